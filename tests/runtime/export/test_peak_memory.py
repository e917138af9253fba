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

from runtime.export.checkpoint import INDEX_FILE, SINGLE_FILE
from runtime.export.layout import expected_tensors
from runtime.export.model_config import load_model_config
from tests.runtime.export.hugging_face import copy_model

MEASURE = """
import sys
from pathlib import Path
from runtime.export import ExportOptions, export_model

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


def allowed(model: Path, itemsize: int) -> float:
    """The limit: 200 MB, and 1.3 times the larger of the largest shard and the largest tensor."""
    shards = max(path.stat().st_size for path in model.glob("*.safetensors"))
    shapes = dict(expected_tensors(load_model_config(model))).values()
    tensor = max(int(np.prod(shape)) for shape in shapes) * itemsize
    return 200e6 + 1.3 * max(shards, tensor)


@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_memory_stays_far_below_the_model(tmp_path: Path, quantization: str) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 24}
    model = make_model(tmp_path / "m", shards=2, vocab_size=4096, **sizes)
    total = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    assert total > 300e6
    assert peak_above_start(model, tmp_path / "engine", quantization) < 160e6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quantization", "itemsize", "shards"),
    [("none", 4, 1), ("none", 4, 6), ("int8", 1, 6), ("int4", 1, 6)],
)
def test_the_limit_holds_for_a_large_vocabulary(
    tmp_path: Path, quantization: str, itemsize: int, shards: int
) -> None:
    sizes: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 3072, "head_dim": 64}
    model = make_model(tmp_path / "m", shards, vocab_size=151_936, num_hidden_layers=6, **sizes)
    peak = peak_above_start(model, tmp_path / "engine", quantization)
    assert peak < allowed(model, itemsize)
