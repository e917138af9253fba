"""Defects that other runtimes of EAGLE trees had, each put back: the checks must fail.

`CAUGHT_BY` names the test of every one; those that show in whole generations are here.
"""

from collections.abc import Callable
from importlib import import_module

import pytest
from msgspec import structs

from hearth.runtime.batch import BatchReorder, DecodingInferenceContext, DecodingRow
from hearth.runtime.device.cpu.ops import CpuBatchSampler
from hearth.runtime.device.device import AcceptedPath
from hearth.runtime.errors import HearthError
from hearth.runtime.generation import speculative
from hearth.runtime.request import RequestOptions, RowRequest, RowToken
from tests.runtime.arrangements import new_row
from tests.runtime.generation.test_speculative import CONFIG, NODES, drain, expected, make, row

CAUGHT_BY = {
    "sampling is forced greedy": (
        "generation.test_defects.test_sampling_that_is_forced_greedy_is_caught",
        "sampling.test_lossless.test_a_mistaken_sampler_fails_the_same_check",
    ),
    "accepted tokens pass the limit": (
        "generation.test_defects.test_tokens_beyond_the_limit_are_caught",
    ),
    "hidden states are compacted in place": (
        "device.test_tree_rounds.test_hidden_states_gathered_in_place_are_caught",
    ),
    "the room for a tree does not follow its size": (
        "generation.test_defects.test_a_tree_beyond_the_capacity_is_caught",
    ),
    "equal scores have no order": (
        "device.test_tree_rounds.test_an_unstable_order_of_equal_scores_is_caught",
    ),
}
HOT = RequestOptions(temperature=40.0, seed=11)
Check = Callable[[], None]


def fails(check: Check) -> bool:
    try:
        check()
    except (AssertionError, HearthError):
        return True
    return False


@pytest.mark.parametrize("defect", CAUGHT_BY)
def test_every_defect_has_its_test(defect: str) -> None:
    for name in CAUGHT_BY[defect]:
        module, _, test = name.rpartition(".")
        assert callable(getattr(import_module(f"tests.runtime.{module}"), test))


def no_token_beyond_the_limit() -> None:
    runtime, _ = make(lambda _: NODES - 1)
    runtime.admit([row([3], 8), row([4], 3)])
    tokens, _ = drain(runtime)
    assert tokens == {0: expected([3], 8), 1: expected([4], 3)}


def all_of_a_path(taker: DecodingRow, path: AcceptedPath | None) -> list[RowToken]:
    """The defect: a row gets every token of its path."""
    assert path is not None
    taker.remaining_budget -= len(path.samples)
    found = []
    for sample in path.samples:
        report = taker.take(sample)
        if report is None:
            taker.token_ids.append(sample.token_id)
            report = RowToken(taker.number, sample.token_id, sample.logprob, sample.top)
        found.append(report)
    return found


def test_tokens_beyond_the_limit_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    no_token_beyond_the_limit()
    monkeypatch.setattr(speculative, "_take", all_of_a_path)
    assert fails(no_token_beyond_the_limit)


@pytest.mark.parametrize("reserve", [1, NODES - 2])
def test_a_tree_beyond_the_capacity_is_caught(reserve: int) -> None:
    def text_to_the_last_slot(room: int) -> None:
        runtime, _ = make(lambda _: 0)
        runtime._context = DecodingInferenceContext(CONFIG, room, runtime._context.owners)
        runtime.admit([row([3], runtime.capacity - 1)])
        assert drain(runtime)[0] == {0: expected([3], runtime.capacity - 1)}

    text_to_the_last_slot(NODES)
    # The defect: a number of slots that knows nothing of the tree.
    assert fails(lambda: text_to_the_last_slot(reserve))


def sampled(*, speculation: bool) -> list[int]:
    """A text drawn with a seed."""
    runtime, _ = make(lambda _: 2)
    asked = structs.replace(HOT, max_tokens=20, speculation=speculation)
    runtime.admit([RowRequest(token_ids=[3], prompt_length=1, options=asked)])
    tokens, steps = drain(runtime)
    assert {step.kind for step in steps[1:]} == {"verify" if speculation else "decode"}
    return tokens[0]


def test_sampling_that_is_forced_greedy_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    vanilla = sampled(speculation=False)

    def text_is_that_of_vanilla_steps() -> None:
        assert sampled(speculation=True) == vanilla

    text_is_that_of_vanilla_steps()
    original = CpuBatchSampler.reorder

    def reorder_greedy(sampler: CpuBatchSampler, reorder: BatchReorder) -> None:
        assignments = [
            new_row(place, structs.replace(row.request, options=RequestOptions()))
            for place, row in reorder.assignments
        ]
        original(sampler, reorder._replace(assignments=assignments))

    monkeypatch.setattr(CpuBatchSampler, "reorder", reorder_greedy)
    assert fails(text_is_that_of_vanilla_steps)
