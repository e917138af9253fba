import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import onnxruntime
import pytest
from click.testing import CliRunner
from msgspec import structs

from hearth.daemon import check
from hearth.daemon.check import inspect_engine, with_answer
from hearth.daemon.cli.check import check as check_command
from hearth.daemon.configuration.settings import Settings, settings_of
from hearth.daemon.engine_settings import runtime_options
from hearth.runtime.config import load_config
from hearth.runtime.engine_folder import ANSWER_FILE, record_files, write_config
from hearth.runtime.errors import HearthError
from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.export.draft_config import DraftOptions
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.onnx_runtime import CUDA_PROVIDER
from hearth.runtime.options import draft_tree
from hearth.runtime.vision_config import VISION_CONFIG_FILE, VISION_FOLDER
from tests.conftest import REFERENCE
from tests.daemon.test_engine_settings import GPU
from tests.eagle_models import write_draft
from tests.vision_models import write_vision_model


def test_the_report_says_what_would_be_used(tiny_engine: Path) -> None:
    settings = settings_of(threads=1, max_batch=2, speculation="off")
    report = inspect_engine(settings, tiny_engine)
    assert report.ok
    assert report.reason is None
    assert (report.device, report.engine_kind, report.dtype) == ("cpu", "onnxruntime", "float32")
    assert (report.max_batch, report.capacity, report.threads) == (2, 96, 1)
    assert report.memory_needed == sum(report.memory.values()) > 0
    assert report.memory_available > report.memory_needed


def test_a_row_holds_less_where_it_speculates(tiny_engine: Path) -> None:
    report = inspect_engine(settings_of(speculation="lookup"), tiny_engine)
    with closing(LLMInferenceRuntime.open(tiny_engine, runtime_options(Settings()))) as runtime:
        assert report.capacity == runtime.capacity == 96 - 4
    assert report.max_prompt_tokens == 91


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (Settings(), "lookup, 4 tokens"),
        (settings_of(speculation="lookup", lookup_tokens=7), "lookup, 7 tokens"),
        (settings_of(speculation="off"), "off"),
        (settings_of(engine_kind="simulated"), "off"),
        (settings_of(capacity=6), "lookup, 4 tokens"),
        (settings_of(capacity=5), "off"),
    ],
)
def test_the_report_says_how_it_speculates(
    tiny_engine: Path, settings: Settings, words: str
) -> None:
    assert inspect_engine(settings, tiny_engine).speculation == words


def test_the_report_has_the_tree_of_a_draft(tmp_path: Path) -> None:
    draft = DraftOptions(folder=write_draft(REFERENCE, tmp_path / "draft"))
    export_model(REFERENCE, tmp_path / "engine", ExportOptions(capacity=96, draft=draft))
    settings = settings_of(draft_tree=draft_tree("4x3/16"))
    report = inspect_engine(settings, tmp_path / "engine")
    assert report.speculation == "eagle, top-k 4, step 3, 16 nodes"


def test_a_draft_that_is_not_there_is_refused(tiny_engine: Path) -> None:
    with pytest.raises(HearthError) as caught:
        inspect_engine(settings_of(speculation="eagle"), tiny_engine)
    assert (caught.value.code, caught.value.field) == ("unsupported_option", "speculation")


def test_what_does_not_fit_is_not_ok(tiny_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hearth.daemon.check.available_memory", lambda: 1)
    report = inspect_engine(Settings(), tiny_engine)
    assert not report.ok
    assert "1 row of 96 tokens would take" in (report.reason or "")
    asked = inspect_engine(settings_of(max_batch=4, capacity=96), tiny_engine)
    assert "lower max_batch or capacity" in (asked.reason or "")


def test_an_onnx_runtime_that_is_too_old_is_not_ok(
    tiny_engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "engine"
    shutil.copytree(tiny_engine, folder)
    write_config(
        folder, structs.replace(load_config(folder), dialect="native", use_trt_native_ops=True)
    )
    monkeypatch.setattr(onnxruntime, "__version__", "1.9.0")
    report = inspect_engine(Settings(), folder)
    assert (report.ok, report.library) == (False, "")
    assert "needs ONNX Runtime 1.24 or newer, this is 1.9.0" in (report.reason or "")


def test_a_damaged_file_is_refused_by_name(tiny_engine: Path, tmp_path: Path) -> None:
    folder = tmp_path / "engine"
    shutil.copytree(tiny_engine, folder)
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_bytes(tokenizer.read_bytes().replace(b"e", b"f", 1))
    with pytest.raises(HearthError) as caught:
        inspect_engine(Settings(), folder)
    assert caught.value.field == "tokenizer.json"
    assert inspect_engine(settings_of(verify=False), folder).ok


def test_more_than_the_engine_was_built_for_is_refused(tiny_engine: Path) -> None:
    with pytest.raises(HearthError) as caught:
        inspect_engine(settings_of(max_batch=5), tiny_engine)
    assert caught.value.field == "max_batch"


def test_no_engine_at_all(tmp_path: Path) -> None:
    with pytest.raises(HearthError) as caught:
        inspect_engine(Settings(), tmp_path / "none")
    assert caught.value.code == "engine_missing"


@pytest.fixture
def gpu_engine(tiny_engine: Path, tmp_path: Path) -> Path:
    """The same files, said to be for a GPU; nothing loads them here."""
    folder = tmp_path / "gpu-engine"
    shutil.copytree(tiny_engine, folder)
    config = structs.replace(load_config(folder), device="cuda")
    (folder / "config.json").write_bytes(msgspec.json.encode(config))
    return folder


@pytest.fixture
def _provider(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA_PROVIDER])
    monkeypatch.setattr(onnxruntime, "__version__", "1.30.0")


@pytest.mark.usefixtures("_provider")
def test_a_gpu_is_reported_with_both_memories(
    gpu_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "gpu_facts", lambda: GPU)
    report = inspect_engine(Settings(), gpu_engine)
    assert (report.ok, report.device, report.gpu, report.threads) == (True, "cuda", GPU, 0)
    assert report.library.startswith("onnxruntime ")
    assert report.memory_available <= GPU.memory_total
    assert {"context", "sampler"} <= set(report.memory)
    assert {"process", "pinned"} <= set(report.host_memory)
    assert report.host_memory_needed == sum(report.host_memory.values())


@pytest.mark.usefixtures("_provider")
def test_a_full_gpu_is_not_ok(gpu_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = structs.replace(GPU, memory_free=0)
    monkeypatch.setattr(check, "gpu_facts", lambda: full)
    report = inspect_engine(Settings(), gpu_engine)
    assert (report.ok, report.code, report.field) == (False, "out_of_memory", "capacity")


@pytest.mark.usefixtures("_provider")
def test_an_integrated_gpu_has_one_memory_with_its_host(
    gpu_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "gpu_facts", lambda: structs.replace(GPU, memory_free=None))
    monkeypatch.setattr(check, "available_memory", lambda: 5 << 30)
    report = inspect_engine(Settings(), gpu_engine)
    assert (report.ok, report.memory_available, report.host_memory) == (True, 5 << 30, {})
    assert {"context", "sampler", "host_process", "host_pinned"} <= set(report.memory)


def test_what_was_chosen_is_told_with_the_reason(
    tiny_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = inspect_engine(Settings(), tiny_engine)
    free = whole.memory_needed
    monkeypatch.setattr(check, "available_memory", lambda: free)
    asked = settings_of(max_batch=1, capacity=96, prefix_cache_bytes=0)
    few = inspect_engine(asked, tiny_engine).memory_needed
    monkeypatch.setattr(check, "available_memory", lambda: few * 8 // 7 + 8)
    report = inspect_engine(Settings(), tiny_engine)
    assert (whole.chosen, report.ok, report.max_batch, report.capacity) == ("", True, 1, 92)
    assert report.memory_needed == few
    given, first = "no prefix cache", "a prefix cache of 256 MiB"
    why = f"1 row of 96 tokens and {given}: 4 rows of 96 tokens and {first} would take "
    assert report.chosen.startswith(why)


@pytest.mark.usefixtures("_provider")
def test_without_a_gpu_the_reason_is_named(
    gpu_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> None:
        raise HearthError("engine_incompatible", "there is no GPU 0, only 0", "device")

    monkeypatch.setattr(check, "gpu_facts", none)
    report = inspect_engine(Settings(), gpu_engine)
    assert (report.ok, report.reason) == (False, "there is no GPU 0, only 0")
    assert (report.code, report.field, report.gpu) == ("engine_incompatible", "device", None)
    assert {"weights", "kv_cache"} <= set(report.memory)
    assert report.memory_available == 0


def test_the_library_without_cuda_is_named_and_nothing_falls_back(
    gpu_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "gpu_facts", lambda: GPU)
    if CUDA_PROVIDER in onnxruntime.get_available_providers():
        pytest.skip("this ONNX Runtime has CUDA")
    report = inspect_engine(Settings(), gpu_engine)
    assert (report.ok, report.device, report.library) == (False, "cuda", "")
    assert report.gpu == GPU
    assert "'onnxruntime-gpu>=1.30'" in (report.reason or "")


SETTINGS = settings_of(threads=1)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine folder with a tower. Tests leave it as it is."""
    folder = tmp_path_factory.mktemp("seeing")
    source = write_vision_model(folder / "model", "qwen3_vl")
    export_model(source, folder / "engine", ExportOptions(capacity=96, max_batch=2))
    return folder / "engine"


def changed(seeing: Path, folder: Path, **fields: Any) -> Path:
    """A copy whose tower's configuration has other fields, and whose records are true."""
    copy = shutil.copytree(seeing, folder) / VISION_FOLDER / VISION_CONFIG_FILE
    copy.write_text(json.dumps(json.loads(copy.read_text()) | fields))
    return folder


def test_the_tower_is_in_the_table_and_in_the_report(seeing: Path) -> None:
    report = inspect_engine(SETTINGS, seeing)
    assert report.tower is not None
    assert (report.tower.family, report.tower.layers, report.tower.image_tokens) == (
        "qwen3_vl", 4, 36,
    )  # fmt: skip
    fewer = inspect_engine(settings_of(threads=1, image_tokens=20), seeing).tower
    assert fewer is not None
    assert fewer.image_tokens == 16
    result = CliRunner().invoke(
        check_command, ["--engine", str(seeing), "--threads", "1", "--answer"]
    )
    assert result.exit_code == 0
    for words in ("qwen3_vl, 4 layers, float32", "36 tokens for a large one", "right: "):
        assert words in result.output


def test_a_wrong_tower_cannot_be_served(seeing: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(seeing, tmp_path / "engine")
    path = folder / VISION_FOLDER / ANSWER_FILE
    answer = json.loads(path.read_text())
    answer["mixes"][1][2][3] += 1
    path.write_text(json.dumps(answer))
    with pytest.raises(HearthError) as error:
        inspect_engine(SETTINGS, folder)
    assert (error.value.code, error.value.field) == ("engine_corrupt", ANSWER_FILE)
    files = record_files(folder / VISION_FOLDER)
    records = {name: {"bytes": one.bytes, "sha256": one.sha256} for name, one in files.items()}
    told = changed(folder, tmp_path / "told", files=records)
    report = with_answer(inspect_engine(SETTINGS, told), SETTINGS, told)
    assert (report.ok, report.code, report.answer) == (False, "wrong_answer", "wrong")
    assert "deepstack_0" in (report.reason or "")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"output_size": 32}, "output_size"),
        ({"deepstack_layers": [0]}, "deepstack_layers"),
        ({"dtype": "float16"}, "dtype"),
    ],
)
def test_a_tower_of_another_model_is_refused(
    seeing: Path, tmp_path: Path, fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(HearthError) as error:
        inspect_engine(SETTINGS, changed(seeing, tmp_path / "engine", **fields))
    assert (error.value.code, error.value.field) == ("engine_corrupt", field)
