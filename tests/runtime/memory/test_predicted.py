import subprocess
import sys
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from bench.memory import measure_memory
from daemon.shipped import DRAFT, SOURCE
from runtime.config import WEIGHTS_FILE, FileRecord
from runtime.engine_folder import DATA_FILE, EMBEDDING_FILE, PLAN_FILE
from runtime.export import DraftOptions, ExportOptions, export_model
from runtime.export.options import resolve_dialect
from runtime.memory.predicted import cuda_weight_bytes, predict_draft_memory, predict_memory
from runtime.memory.sizes import projection_bytes, projection_elements
from runtime.options import EagleDraftingConfig
from runtime.weights.layout import load_layout
from tests.references import reference_folder
from tests.runtime.engine_configs import draft_config, small_config
from tests.runtime.export.test_peak_memory import make_model

ROOT = Path(__file__).parents[3]
MEASURE = """
import sys
from pathlib import Path
from runtime.config import load_config
from runtime.executor.engine import EngineOptions
from runtime.executor.onnx_engine import OnnxEngine

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) << 10

start = resident()
folder = Path(sys.argv[1])
engine = OnnxEngine.open(folder, load_config(folder), EngineOptions(threads=1))
print(resident() - start)
"""


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_the_bytes_of_projections_are_those_of_the_data_file(
    tmp_path: Path, quantization: Literal["none", "int8", "int4"]
) -> None:
    folder = tmp_path / "engine"
    options = ExportOptions(quantization=quantization)
    config = export_model(reference_folder("qwen3_untied"), folder, options)
    stored = (folder / DATA_FILE).stat().st_size
    padding = 2 * 4096 * (4 * config.num_decoder_layers + 1)
    assert stored - padding <= projection_bytes(config) <= stored


def test_parts_grow_with_what_they_depend_on() -> None:
    config = small_config()
    small = predict_memory(config, max_batch=1, capacity=32)
    rows = predict_memory(config, max_batch=2, capacity=32)
    slots = predict_memory(config, max_batch=1, capacity=64)
    assert small["kv_cache"] == 32 * 2 * 2 * 8 * 4
    assert rows["kv_cache"] == slots["kv_cache"] == 2 * small["kv_cache"]
    assert rows["step_buffers"] > small["step_buffers"] == slots["step_buffers"]
    assert slots["attention_scratch"] == pytest.approx(2 * small["attention_scratch"], rel=0.01)
    assert rows["weights"] == slots["weights"] == small["weights"]
    assert small["weights"] == projection_elements(config) * 4


def test_a_16_bit_cache_takes_half() -> None:
    half = msgspec.structs.replace(small_config(), dtype="float16", kv_cache_dtype="float16")
    wide, narrow = (predict_memory(c, max_batch=2, capacity=64) for c in (small_config(), half))
    assert 2 * narrow["kv_cache"] == wide["kv_cache"]
    assert 2 * narrow["embedding"] == wide["embedding"]


def test_the_classic_dialect_holds_new_rows_and_more_scores() -> None:
    classic = msgspec.structs.replace(small_config(), dialect="classic")
    native, other = (predict_memory(c, max_batch=2, capacity=64) for c in (small_config(), classic))
    assert other["step_buffers"] > native["step_buffers"]
    assert other["attention_scratch"] > native["attention_scratch"]


def test_the_table_is_as_large_as_its_file() -> None:
    files = {EMBEDDING_FILE: FileRecord(12345, "")}
    config = msgspec.structs.replace(small_config(), files=files)
    assert predict_memory(config, max_batch=1, capacity=8)["embedding"] == 12345


def test_weights_that_a_plan_binds_lie_beside_it_and_the_table_once() -> None:
    files = {PLAN_FILE: FileRecord(1000, ""), WEIGHTS_FILE: FileRecord(90_000, "")}
    plan = msgspec.structs.replace(small_config(), backend="tensorrt", device="cuda", files=files)
    bound = msgspec.structs.replace(plan, external_weight_files=(WEIGHTS_FILE,))
    table = predict_memory(bound, max_batch=1, capacity=8)["embedding"]
    assert 0 < table < 90_000
    assert cuda_weight_bytes(plan) == 1000
    assert cuda_weight_bytes(bound) == 1000 + 90_000 - table


@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_a_table_among_external_weights_is_as_large_as_it_is(
    tmp_path: Path, quantization: Literal["none", "int4"]
) -> None:
    # The sources of a tied head have 16 bits, which a head that reads the table widens.
    for name, item in (("qwen3", 4 if quantization == "none" else 2), ("qwen3_untied", 2)):
        target = tmp_path / name
        options = ExportOptions(quantization=quantization, external_weights=True)
        config = export_model(reference_folder(name), target, options)
        table = load_layout(target).tensors["embedding"].nbytes
        assert table == item * config.vocab_size * config.hidden_size
        foretold = predict_memory(config, max_batch=1, capacity=8)["embedding"]
        # Norms are not told from it.
        assert table <= foretold <= table + 4096


def test_a_simulated_engine_has_no_weights() -> None:
    config = msgspec.structs.replace(small_config(), backend="simulated")
    parts = predict_memory(config, max_batch=1, capacity=8)
    assert parts["weights"] == parts["attention_scratch"] == parts["activations"] == 0


DRAFTING = EagleDraftingConfig(drafting_top_k=2, drafting_step=3, verify_tree_size=5)


def test_trees_count_in_buffers_and_scores() -> None:
    plain = small_config()
    trees = msgspec.structs.replace(
        plain, enable_eagle_spec_decode=True, output_hidden_dim=48, max_verify_tree_size=5
    )
    small, large = (predict_memory(c, max_batch=2, capacity=64) for c in (plain, trees))
    assert large["attention_scratch"] - small["attention_scratch"] == 2 * 16 * 64 * 2
    assert large["step_buffers"] > small["step_buffers"]
    same = set(small) - {"attention_scratch", "step_buffers"}
    assert [large[name] for name in same] == [small[name] for name in same]


def test_a_tree_larger_than_a_chunk_is_the_longest_step() -> None:
    config = msgspec.structs.replace(small_config(), max_verify_tree_size=32)
    small, large = (predict_memory(c, max_batch=1, capacity=64) for c in (small_config(), config))
    assert large["activations"] == 2 * small["activations"]


def test_captured_prefill_steps_of_a_gpu_count() -> None:
    config = msgspec.structs.replace(small_config(), device="cuda", prefill_chunk=64)
    kernels = msgspec.structs.replace(config, backend="kernels", dtype="float16")
    assert predict_memory(config, max_batch=4, capacity=64)["prompt_graphs"] == 0
    one, four = (predict_memory(kernels, max_batch=n, capacity=64)["prompt_graphs"] for n in (1, 4))
    assert four == 4 * one > 2 * config.num_decoder_layers << 10


def test_a_draft_has_parts_of_its_own_and_no_embedding() -> None:
    config = draft_config(small_config())
    small = predict_draft_memory(config, DRAFTING, max_batch=1, capacity=32)
    rows = predict_draft_memory(config, DRAFTING, max_batch=2, capacity=32)
    slots = predict_draft_memory(config, DRAFTING, max_batch=1, capacity=64)
    assert set(small) == {
        "draft_weights",
        "draft_zeros",
        "draft_kv_cache",
        "draft_rope",
        "draft_buffers",
        "draft_scratch",
    }
    assert small["draft_kv_cache"] == 32 * 2 * 8 * 4
    assert rows["draft_kv_cache"] == slots["draft_kv_cache"] == 2 * small["draft_kv_cache"]
    assert rows["draft_buffers"] > small["draft_buffers"] == slots["draft_buffers"]
    assert rows["draft_scratch"] > small["draft_scratch"] < slots["draft_scratch"]
    assert rows["draft_weights"] == slots["draft_weights"] == projection_elements(config) * 4


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
    config = msgspec.structs.replace(small_config(), max_kv_cache_capacity=1024)
    one, three = (predict_memory(config, max_batch=1, capacity=c) for c in (256, 1024))
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
    predicted = predict_memory(config, max_batch=1, capacity=256)["weights"]
    assert int(done.stdout) == pytest.approx(predicted, rel=0.1)
