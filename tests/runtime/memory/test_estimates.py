import subprocess
import sys
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from hearth.bench.memory import measure_memory
from hearth.daemon.shipped import DRAFT, SOURCE
from hearth.runtime.config import LORA_TARGETS
from hearth.runtime.export import DraftOptions, ExportOptions, export_model
from hearth.runtime.export.options import resolve_dialect
from hearth.runtime.memory.estimates import adapter_bytes, estimate_engine, prompt_graph_bytes
from hearth.runtime.tensors.lora import lora_targets
from tests.runtime.engine_configs import small_config
from tests.runtime.export.test_peak_memory import make_model

ROOT = Path(__file__).parents[3]
MEASURE = """
import sys
from pathlib import Path
from hearth.runtime.config import load_config
from hearth.runtime.executor.engine import EngineOptions
from hearth.runtime.executor.onnx_engine import OnnxEngine

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) << 10

start = resident()
folder = Path(sys.argv[1])
engine = OnnxEngine.open(folder, load_config(folder), EngineOptions(threads=1))
print(resident() - start)
"""


def test_a_simulated_engine_has_no_weights() -> None:
    config = msgspec.structs.replace(small_config(), backend="simulated")
    parts = estimate_engine(config)
    assert parts["weights"] == parts["attention_scratch"] == parts["activations"] == 0


def test_a_tree_larger_than_a_chunk_is_the_longest_step() -> None:
    config = msgspec.structs.replace(small_config(), max_verify_tree_size=32)
    small, large = (estimate_engine(c) for c in (small_config(), config))
    assert large["activations"] == 2 * small["activations"]


def test_captured_prefill_steps_of_a_gpu_count() -> None:
    config = msgspec.structs.replace(small_config(), device="cuda", prefill_chunk=64)
    kernels = msgspec.structs.replace(config, backend="kernels", dtype="float16")
    assert prompt_graph_bytes(config) == 0
    one, four = (
        prompt_graph_bytes(msgspec.structs.replace(kernels, max_supported_batch_size=n))
        for n in (1, 4)
    )
    assert four == 4 * one > 2 * config.num_decoder_layers << 10


def test_captured_prompts_have_the_kernels_of_adapters() -> None:
    plain = msgspec.structs.replace(small_config(), backend="kernels", device="cuda")
    taking = msgspec.structs.replace(plain, max_supported_lora_rank=8)
    taking = msgspec.structs.replace(taking, lora_targets=lora_targets(taking))
    # Twelve beside the fourteen of a layer; eight stand outside of the layers.
    kernels = [prompt_graph_bytes(one) for one in (plain, taking)]
    assert kernels[1] * (2 * 14 + 8) == kernels[0] * (2 * 26 + 8)


def test_adapters_on_the_cpu_are_as_large_as_their_files() -> None:
    config = msgspec.structs.replace(
        small_config(), max_supported_lora_rank=8, lora_targets=LORA_TARGETS
    )
    assert adapter_bytes(config, [100, 20]) == 120


@pytest.mark.slow
def test_what_a_draft_adds_to_a_real_runtime(tmp_path: Path) -> None:
    added: dict[str, tuple[float, float]] = {}
    for name, draft in (("plain", None), ("drafted", DraftOptions(folder=DRAFT))):
        folder = tmp_path / name
        export_model(SOURCE, folder, ExportOptions(capacity=512, draft=draft))
        found = measure_memory(folder, tmp_path / "log")
        # The interpreter's part counts the whole daemon, of which this process is one half.
        process = found.parts["context"]
        added[name] = (
            found.predicted_mb - process.predicted_mb,
            found.measured_mb - process.measured_mb,
        )
    for predicted, measured in added.values():
        assert predicted == pytest.approx(measured, rel=0.15)


def test_scores_of_every_bucket_count() -> None:
    one, three = (
        estimate_engine(msgspec.structs.replace(small_config(), max_kv_cache_capacity=slots))
        for slots in (256, 1024)
    )
    assert three["attention_scratch"] == pytest.approx(7 * one["attention_scratch"], rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_the_weights_of_a_real_session(
    tmp_path: Path, quantization: Literal["none", "int8", "int4"]
) -> None:
    if quantization == "int8" and resolve_dialect(ExportOptions()) == "classic":
        pytest.skip("ONNX Runtime 1.23 packs int4 alone")
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    model = make_model(tmp_path / "m", 1, vocab_size=8192, **sizes, **heads)
    config = export_model(model, tmp_path / "engine", ExportOptions(quantization=quantization))
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "engine")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True)
    predicted = estimate_engine(config)["weights"]
    assert int(done.stdout) == pytest.approx(predicted, rel=0.1)
