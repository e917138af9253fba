from typing import Any

import numpy as np
import pytest
from msgspec import structs

from hearth.runtime.batch import BatchReorder, RowMove, SlotAssignment
from hearth.runtime.config import LLMEngineRunnerConfig, RopeConfig
from hearth.runtime.device.cpu.cpu_device import CpuDevice
from hearth.runtime.device.cpu.ops import CpuImageOps
from hearth.runtime.device.device import RotaryTables
from hearth.runtime.errors import HearthError
from hearth.runtime.image_processing.positions import RowPositions, row_positions
from hearth.runtime.images import EmbeddedImage, ImageSpan, Slot
from hearth.runtime.kv_cache.kv_cache_manager import HybridCacheManager, RotaryRows
from hearth.runtime.request import RowRequest
from tests.runtime.engine_configs import small_config

SLOTS, PAIRS = 64, 4


class Counting(CpuImageOps):
    """Notes whose tables are filled."""

    def __init__(self) -> None:
        self.filled: list[int] = []

    def fill_rotary(self, tables: RotaryTables, row: int, positions: RowPositions) -> None:
        self.filled.append(row)
        super().fill_rotary(tables, row, positions)


def config(**changes: Any) -> LLMEngineRunnerConfig:
    rope = RopeConfig(type="mrope", mrope_section=(2, 1, 1))
    return structs.replace(
        small_config(), rope_config=rope, use_context_dependent_rope=True, **changes
    )


def rotary_rows() -> tuple[RotaryRows, Counting]:
    """Tables whose numbers are positions, and what fills them."""
    device, ops = CpuDevice(), Counting()
    device.image_ops = ops
    table = np.arange(SLOTS, dtype=np.float32)[:, None] + np.zeros(PAIRS, np.float32)
    return RotaryRows(config(), {"cos": table, "sin": -table}, device), ops


def seeing(start: int, grid: tuple[int, int, int]) -> RowRequest:
    count = int(np.prod(grid))
    image = EmbeddedImage(Slot(0, 0, start), count, (ImageSpan(start, count, 0, grid),))
    ids = [1] * (start + count + 2)
    return RowRequest(token_ids=ids, prompt_length=len(ids), images=[image])


def check(rows: RotaryRows, place: int, request: RowRequest | None) -> None:
    """The tables of a place are those of a row with such images, or of text."""
    cos, sin = (table.array[place] for table in rows.tensors)
    expected = np.tile(np.arange(SLOTS, dtype=np.float32)[:, None], (1, PAIRS))
    if request is not None:
        spans = [span for image in request.images for span in image.spans]
        prompt, delta = row_positions(request.prompt_length, spans)
        expected += delta
        expected[: prompt.shape[1]] = prompt[[0, 0, 1, 2]].T
    np.testing.assert_array_equal(cos, expected)
    np.testing.assert_array_equal(sin, -expected)


def test_tables_go_with_their_rows() -> None:
    rows, _ = rotary_rows()
    first, second, text = seeing(2, (1, 2, 3)), seeing(4, (1, 5, 2)), RowRequest(
        token_ids=[1], prompt_length=1
    )  # fmt: skip
    rows.reorder(BatchReorder.fresh([first, text, second]))
    for place, request in enumerate((first, None, second)):
        check(rows, place, request)
    check(rows, 3, None)
    rows.reorder(BatchReorder(2, moves=[RowMove(2, 0, 9)]))
    check(rows, 0, second)
    check(rows, 1, None)
    rows.reorder(
        BatchReorder(
            3, moves=[RowMove(0, 2, 9), RowMove(1, 0, 1)], assignments=[SlotAssignment(1, first)]
        )
    )
    for place, request in enumerate((None, first, second)):
        check(rows, place, request)
    rows.reset(3)
    for place in range(3):
        check(rows, place, None)


def test_a_restored_prefix_stands_where_it_stood() -> None:
    rows, _ = rotary_rows()
    caches = HybridCacheManager(config(), CpuDevice())
    caches.rotary = rows
    picture = seeing(2, (1, 2, 3))
    rows.reorder(BatchReorder.fresh([picture]))
    caches.reset(1)
    length = picture.prompt_length + 1
    caches.commit([length])
    whole, image, before = (caches.capture(0, one) for one in (length, 8, 2))
    caches.reset(3)
    rows.reset(3)
    caches.restore(0, before)
    caches.restore(1, image)
    caches.restore(2, whole)
    assert caches.row_lengths == [2, 8, length]
    check(rows, 0, None)
    # What follows a picture stands behind it, be it prompt or reply.
    for place in (1, 2):
        check(rows, place, picture)


def test_rows_of_text_cost_nothing() -> None:
    rows, ops = rotary_rows()
    assert ops.filled == [0, 1, 2, 3]
    text = RowRequest(token_ids=[1, 2], prompt_length=2)
    rows.reorder(BatchReorder.fresh([text] * 4))
    rows.reorder(BatchReorder(2, moves=[RowMove(3, 0, 2)]))
    rows.reorder(BatchReorder(3, assignments=[SlotAssignment(2, seeing(1, (1, 1, 2)))]))
    rows.reorder(BatchReorder(3))
    assert ops.filled == [0, 1, 2, 3, 2]


def test_rows_that_begin_at_odd_addresses_are_refused_on_a_gpu() -> None:
    device = CpuDevice()
    table = np.zeros((60, PAIRS), np.float32)
    tables = {"cos": table, "sin": table}
    with pytest.raises(HearthError, match="multiple of 16") as caught:
        RotaryRows(config(device="cuda", max_kv_cache_capacity=60), tables, device)
    assert (caught.value.code, caught.value.field) == ("invalid_value", "capacity")
