from pathlib import Path
from typing import Any

import msgspec
import pytest

from hearth.runtime.errors import HearthError
from hearth.runtime.export.draft_config import DraftOptions
from hearth.runtime.export.options import (
    ExportOptions,
    check_options,
    resolve_block_size,
    resolve_capacity,
    resolve_chunk,
    resolve_dialect,
)


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
