import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

from hearth.runtime.config import WEIGHTS_FILE, load_config
from hearth.runtime.engine_folder import (
    ANSWER_FILE,
    EMBEDDING_FILE,
    REQUIRED_FILES,
    ROPE_FILE,
    TEMPLATE_FILE,
    verify_folder,
)
from hearth.runtime.errors import HearthError
from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.export import export as export_module
from hearth.runtime.export.checkpoint import Checkpoint
from hearth.runtime.export.layout import EMBEDDING
from hearth.runtime.export.options import check_options
from hearth.runtime.rope import rope_tables
from hearth.runtime.runner.engine_tables import read_shapes
from tests.references import reference_folder
from tests.runtime.export.hugging_face import Tensors, change_tensors, copy_model


def test_the_folder_is_complete_and_passes_its_own_check(tmp_path: Path) -> None:
    config = export_model(reference_folder("qwen3"), tmp_path / "engine", ExportOptions())
    assert load_config(tmp_path / "engine") == config
    verify_folder(tmp_path / "engine", config, digests=True)
    assert set(config.files) == {*REQUIRED_FILES, TEMPLATE_FILE, ANSWER_FILE}


def test_the_same_model_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = (
        export_model(reference_folder("llama"), tmp_path / name, ExportOptions()) for name in "ab"
    )
    assert first == second


def test_the_engine_knows_the_name_of_its_model(tmp_path: Path) -> None:
    cached = tmp_path / "models--Qwen--Qwen3-0.6B" / "snapshots" / "c1899de2"
    assert (
        export_module.model_name(cached),
        export_module.model_name(tmp_path / "qwen" / ".."),
    ) == ("Qwen3-0.6B", tmp_path.name)
    config = export_model(reference_folder("qwen3"), tmp_path / "engine", ExportOptions())
    assert config.model_name == "qwen3"


def test_rotary_tables_reach_to_the_capacity(tmp_path: Path) -> None:
    options = ExportOptions(capacity=40)
    config = export_model(reference_folder("llama"), tmp_path / "engine", options)
    stored = load_file(tmp_path / "engine" / ROPE_FILE)
    for name, table in zip(("cos", "sin"), rope_tables(config.rope_config, 16, 40), strict=True):
        np.testing.assert_array_equal(stored[name], table)


@pytest.mark.parametrize(
    ("name", "options", "dtype"),
    [
        ("qwen3", ExportOptions(), "float32"),
        ("qwen3", ExportOptions(dtype="float16"), "float16"),
        ("qwen3", ExportOptions(quantization="int8"), "bfloat16"),
        ("qwen3_untied", ExportOptions(), "bfloat16"),
        ("llama3_scaled", ExportOptions(), "float16"),
        ("llama", ExportOptions(), "float32"),
        ("llama", ExportOptions(head_quantization="int8"), "float32"),
        ("llama", ExportOptions(quantization="int4"), "float16"),
        ("llama", ExportOptions(quantization="int8", external_weights=True), "float16"),
        ("llama_linear", ExportOptions(quantization="int4", head_quantization="none"), "float32"),
    ],
)
def test_the_table_keeps_its_type_unless_the_head_reads_it(
    tmp_path: Path, name: str, options: ExportOptions, dtype: str
) -> None:
    config = export_model(reference_folder(name), tmp_path / "engine", options)
    file = WEIGHTS_FILE if options.external_weights else EMBEDDING_FILE
    table = load_file(tmp_path / "engine" / file)["embedding"]
    assert table.dtype.name == dtype
    stored = Checkpoint(reference_folder(name)).matrix(EMBEDDING, slice(None), slice(None))
    assert np.array_equal(table, stored.astype(table.dtype))
    shapes = read_shapes(config, tmp_path / "engine")
    assert shapes.embedding.nbytes == table.nbytes


def test_a_table_beyond_float16_becomes_bfloat16(tmp_path: Path) -> None:
    def widen(tensors: Tensors) -> None:
        tensors[EMBEDDING][7, 3] = 70_000

    source = copy_model("llama", tmp_path / "m")
    change_tensors(source, widen)
    config = export_model(source, tmp_path / "engine", ExportOptions(quantization="int8"))
    assert config.embedding_dtype == "bfloat16"
    assert load_file(tmp_path / "engine" / EMBEDDING_FILE)["embedding"].dtype.name == "bfloat16"


def test_the_drift_is_kept_where_something_is_quantised(tmp_path: Path) -> None:
    for name, kind in (("none", "none"), ("four", "int4")):
        options = ExportOptions(quantization=kind)  # type: ignore[arg-type]
        config = export_model(reference_folder("llama"), tmp_path / name, options)
        assert (config.drift is not None) == (kind != "none")
        assert load_config(tmp_path / name) == config


def test_progress_rises_to_the_end_of_every_stage(tmp_path: Path) -> None:
    heard: dict[str, list[tuple[int, int]]] = {}
    export_model(
        reference_folder("qwen3"),
        tmp_path / "engine",
        ExportOptions(quantization="int4"),
        lambda stage, done, total: heard.setdefault(stage, []).append((done, total)),
    )
    assert list(heard) == ["embedding", "weights", "answer", "digests"]
    for steps in heard.values():
        assert steps == sorted(steps)
        assert steps[0][0] == 0
        assert steps[-1][0] == steps[-1][1] > 0
    assert len(heard["weights"]) > 10


def test_a_failed_export_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise HearthError("internal", "stop")

    monkeypatch.setattr(export_module, "write_config", fail)
    with pytest.raises(HearthError):
        export_model(reference_folder("qwen3"), tmp_path / "engine", ExportOptions())
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_export_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(stage: str, done: int, _total: int) -> None:
        if stage == "weights" and done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_model(reference_folder("qwen3"), tmp_path / "engine", ExportOptions(), interrupt)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_reported_in_our_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export_module, "write_config", fail)
    with pytest.raises(HearthError, match=r"written \(No space left on device\)") as caught:
        export_model(reference_folder("qwen3"), tmp_path / "engine", ExportOptions())
    assert caught.value.field == "target"
    assert list(tmp_path.iterdir()) == []


def test_a_name_is_what_the_model_is_called(tmp_path: Path) -> None:
    options = ExportOptions(name="Qwen/Qwen3-tiny")
    config = export_model(reference_folder("qwen3"), tmp_path / "int4", options)
    assert (config.model_name, config.served_name) == ("Qwen/Qwen3-tiny",) * 2
    with pytest.raises(HearthError, match="name must have"):
        check_options(ExportOptions(name="a\nb"))


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_nothing_is_overwritten(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "engine"
    kept = target if kind == "file" else target / "kept"
    kept.parent.mkdir(exist_ok=True)
    kept.write_text("mine")
    with pytest.raises(HearthError) as caught:
        export_model(reference_folder("qwen3"), target, ExportOptions())
    assert (caught.value.code, caught.value.field) == ("invalid_value", "target")
    assert kept.read_text() == "mine"


def test_missing_parents_and_an_empty_target_are_fine(tmp_path: Path) -> None:
    target = tmp_path / "some" / "engine"
    target.mkdir(parents=True)
    export_model(reference_folder("qwen3"), target, ExportOptions())
    assert (target / "config.json").is_file()


def test_the_umask_decides_who_may_read(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        export_model(reference_folder("qwen3"), tmp_path / "engine", ExportOptions())
    finally:
        os.umask(before)
    assert (tmp_path / "engine").stat().st_mode & 0o777 == 0o750


def test_a_bad_option_is_refused_before_the_model_is_read(tmp_path: Path) -> None:
    options = msgspec.structs.replace(ExportOptions(), max_batch=0)
    with pytest.raises(HearthError) as caught:
        export_model(tmp_path / "nothing", tmp_path / "engine", options)
    assert caught.value.field == "max_batch"


def test_a_bad_model_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    source = copy_model("llama", tmp_path / "m", mlp_bias=True)
    with pytest.raises(HearthError):
        export_model(source, tmp_path / "out" / "engine", ExportOptions())
    assert not (tmp_path / "out").exists()
