"""Export needs memory for pieces of a model, not for the model."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from hearth.runtime.export.checkpoint import INDEX_FILE, SINGLE_FILE
from hearth.runtime.export.layout import expected_tensors
from hearth.runtime.export.model_config import load_model_config
from tests.runtime.export.hugging_face import copy_model

MEASURE = """
import sys
from pathlib import Path
from hearth.runtime.export import ExportOptions, export_model

def kibibytes(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))

start = kibibytes("VmRSS")
export_model(Path(sys.argv[1]), Path(sys.argv[2]), ExportOptions(quantization=sys.argv[3]))
print((kibibytes("VmHWM") - start) << 10)
"""


def make_model(folder: Path, shards: int, **sizes: int) -> Path:
    """A Qwen3 model in bfloat16 whose weights repeat a few random values."""
    copy_model("qwen3", folder, **sizes, layer_types=None)
    (folder / SINGLE_FILE).unlink()
    names = dict(expected_tensors(load_model_config(folder)))
    random = np.random.default_rng(0)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard}.safetensors"
        part = {name: names[name] for name in list(names)[shard::shards]}
        tensors = {name: repeated(random, shape) for name, shape in part.items()}
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def repeated(random: np.random.Generator, shape: tuple[int, ...]) -> NDArray[Any]:
    """Values that differ from tensor to tensor, since equal weights would be stored once."""
    values = random.standard_normal(9973, np.float32).astype(ml_dtypes.bfloat16)
    return np.resize(values, shape)


def peak_above_start(model: Path, target: Path, quantization: str) -> int:
    command = [sys.executable, "-c", MEASURE, str(model), str(target), quantization]
    root = Path(__file__).parents[3]
    done = subprocess.run(
        command, cwd=root, env=os.environ, capture_output=True, check=True, text=True
    )
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_memory_stays_far_below_the_model(tmp_path: Path, quantization: str) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 12}
    model = make_model(tmp_path / "m", shards=2, vocab_size=4096, **sizes)
    total = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    assert total > 150e6
    assert peak_above_start(model, tmp_path / "engine", quantization) < 80e6


@pytest.mark.parametrize(("quantization", "shards"), [("none", 1), ("int4", 6)])
def test_memory_stays_below_half_of_a_large_table(
    tmp_path: Path, quantization: str, shards: int
) -> None:
    """Of the embedding in float32; the logits of the known answer take a part of it too."""
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64}
    model = make_model(tmp_path / "m", shards, vocab_size=151_936, num_hidden_layers=1, **sizes)
    table = 151_936 * 512 * 4
    peak = peak_above_start(model, tmp_path / "engine", quantization)
    assert peak < table / 2
