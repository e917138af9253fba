"""Faults put into the runtime itself: the trials must find each of them."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest

from hearth.runtime.batch import BatchReorder, DecodingInferenceContext, DirtySlots
from hearth.runtime.device.cpu.ops import CpuBatchSampler
from hearth.runtime.errors import HearthError
from hearth.runtime.kv_cache.kv_cache_manager import HybridCacheManager, KVCacheManager
from hearth.runtime.runner.bindings import StepBindings
from tests.runtime.generation.schedules.trial import ViolationError
from tests.runtime.generation.test_join_simulated import House, Kind

SCHEDULES = 400
_reorder, _settle = HybridCacheManager.reorder, CpuBatchSampler.reorder
_sample, _begin = CpuBatchSampler.sample, StepBindings.begin_prompt
_stale, _release = DecodingInferenceContext._stale, DecodingInferenceContext.release


def nothing_is_zeroed(caches: HybridCacheManager, reorder: BatchReorder) -> None:
    _reorder(caches, reorder._replace(stale=()))


def rows_move_in_another_order(cache: KVCacheManager, moves: Sequence[Any]) -> None:
    cache._storage.move(moves[::-1], (cache.bucket, cache.bucket))


def a_moved_row_keeps_the_newest_token_of_its_place(
    sampler: CpuBatchSampler, reorder: BatchReorder
) -> None:
    tokens = sampler._next_tokens
    before = tokens.copy()
    _settle(sampler, reorder)
    tokens[:] = before


def joiners_are_sampled_from_place_0(
    sampler: CpuBatchSampler, rows: int, _first: int = 0, picked: int | None = None
) -> Any:
    return _sample(sampler, rows, 0, picked)


def a_chunk_begins_where_the_first_row_does(
    steps: StepBindings, first: int, rows: int, width: int
) -> None:
    _begin(steps, first, rows, width)
    lengths = steps.caches.row_lengths
    steps._ops.set_lengths(steps._prompt.inputs.lengths, [lengths[first]] * rows)


def a_failed_row_leaves_its_numbers(*args: Any) -> list[DirtySlots]:
    return [stale for stale in _stale(*args) if stale.begin]


def a_released_row_forgets_a_token(context: DecodingInferenceContext, number: int) -> Any:
    return (_release(context, number) or [])[:-1]


FAULTS: dict[Callable[..., Any], tuple[Any, str]] = {
    nothing_is_zeroed: (HybridCacheManager, "reorder"),
    rows_move_in_another_order: (KVCacheManager, "move"),
    a_moved_row_keeps_the_newest_token_of_its_place: (CpuBatchSampler, "reorder"),
    joiners_are_sampled_from_place_0: (CpuBatchSampler, "sample"),
    a_chunk_begins_where_the_first_row_does: (StepBindings, "begin_prompt"),
    a_failed_row_leaves_its_numbers: (DecodingInferenceContext, "_stale"),
    a_released_row_forgets_a_token: (DecodingInferenceContext, "release"),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_each_fault_is_found(fault: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def all_schedules() -> None:
        houses = [House(Kind(gpu, chains=False)) for gpu in (False, True)]
        for number in range(SCHEDULES):
            houses[number % 2].trial(Random(number).randbytes(120))

    monkeypatch.setattr(*FAULTS[fault], fault)
    with pytest.raises((ViolationError, HearthError)):
        all_schedules()
