"""Exports of whole folders, which need memory for pieces of a model, not for the model."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

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
from hearth.runtime.export.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint
from hearth.runtime.export.draft_config import DraftOptions
from hearth.runtime.export.layout import EMBEDDING, expected_tensors
from hearth.runtime.export.model_config import load_model_config
from hearth.runtime.export.options import (
    check_options,
    resolve_block_size,
    resolve_capacity,
    resolve_chunk,
    resolve_dialect,
)
from hearth.runtime.export.reference_pass import rope_tables
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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dialect", "modern"),
        ("dtype", "float64"),
        ("quantization", "int2"),
        ("block_size", -1),
        ("block_size", 48),
        ("capacity", -1),
        ("capacity", 1),
        ("max_batch", 0),
        ("max_batch", 999_999_999),
        ("prefill_chunk", -1),
        ("prefill_chunk", 99_999_999),
        ("capacity", 1 << 21),
    ],
)
def test_an_option_without_meaning_is_named(name: str, value: Any) -> None:
    options = msgspec.structs.replace(ExportOptions(), **{name: value})
    with pytest.raises(HearthError) as caught:
        check_options(options)
    assert (caught.value.code, caught.value.field) == ("invalid_value", name)


def test_blocks_of_weights_that_are_not_quantised_are_refused() -> None:
    check_options(ExportOptions(block_size=64, quantization="int8"))
    with pytest.raises(HearthError) as caught:
        check_options(ExportOptions(block_size=64))
    assert (caught.value.code, caught.value.field) == ("unsupported_option", "block_size")


def test_bfloat16_is_for_a_gpu_without_trees() -> None:
    graph = ExportOptions(dtype="bfloat16", backend="onnxruntime", device="cuda")
    check_options(graph)
    chains = DraftOptions(folder=Path("d"), verify="chains")
    check_options(msgspec.structs.replace(graph, draft=chains))
    trees = msgspec.structs.replace(graph, draft=DraftOptions(folder=Path("d")))
    for options in (ExportOptions(dtype="bfloat16"), trees):
        with pytest.raises(HearthError) as caught:
            check_options(options)
        assert (caught.value.code, caught.value.field) == ("unsupported_option", "dtype")


def test_the_defaults_pass() -> None:
    check_options(ExportOptions())


@pytest.mark.parametrize(
    ("version", "dialect"),
    [("1.23.2", "classic"), ("1.24.0", "native"), ("1.31.1", "native"), ("2.0.0rc1", "native")],
)
def test_auto_is_the_newest_dialect_that_the_runtime_reads(version: str, dialect: str) -> None:
    assert resolve_dialect(ExportOptions(), version) == dialect


@pytest.mark.parametrize("dialect", ["native", "classic"])
def test_a_chosen_dialect_stays(dialect: Any) -> None:
    assert resolve_dialect(ExportOptions(dialect=dialect), "1.23.2") == dialect


@pytest.mark.parametrize(
    ("capacity", "longest", "expected"), [(0, 512, 512), (0, 40960, 4096), (8192, 40960, 8192)]
)
def test_capacity(capacity: int, longest: int, expected: int) -> None:
    assert resolve_capacity(ExportOptions(capacity=capacity), longest) == expected


def test_a_capacity_beyond_the_model_is_refused() -> None:
    with pytest.raises(HearthError) as caught:
        resolve_capacity(ExportOptions(capacity=513), 512)
    assert caught.value.field == "capacity"


@pytest.mark.parametrize(
    ("asked", "capacity", "chunk"), [(0, 4096, 256), (0, 96, 96), (64, 96, 64)]
)
def test_a_prefill_chunk(asked: int, capacity: int, chunk: int) -> None:
    assert resolve_chunk(ExportOptions(prefill_chunk=asked), capacity) == chunk


def test_a_prefill_chunk_beyond_the_capacity_is_refused() -> None:
    with pytest.raises(HearthError, match="at most 96, the capacity") as caught:
        resolve_chunk(ExportOptions(prefill_chunk=97), 96)
    assert (caught.value.code, caught.value.field) == ("invalid_value", "prefill_chunk")


@pytest.mark.parametrize(
    ("options", "inputs", "expected"),
    [
        (ExportOptions(), [7], 0),
        (ExportOptions(quantization="int8"), [1024, 3072], 128),
        (ExportOptions(quantization="int8"), [192, 512], 64),
        (ExportOptions(quantization="int4"), [1024, 3072], 32),
        (ExportOptions(quantization="int4"), [1024, 48], 16),
        (ExportOptions(quantization="int4", block_size=256), [1024, 512], 256),
    ],
)
def test_block_size(options: ExportOptions, inputs: list[int], expected: int) -> None:
    assert resolve_block_size(options, inputs) == expected


@pytest.mark.parametrize(
    ("block_size", "inputs"), [(0, [1024, 40]), (64, [1024, 96]), (256, [128, 256])]
)
def test_a_block_that_does_not_divide_a_projection_is_refused(
    block_size: int, inputs: list[int]
) -> None:
    with pytest.raises(HearthError) as caught:
        resolve_block_size(ExportOptions(quantization="int8", block_size=block_size), inputs)
    assert (caught.value.code, caught.value.field) == ("invalid_value", "block_size")
