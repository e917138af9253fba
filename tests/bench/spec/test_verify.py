import pytest

from hearth.bench.spec.contest import Divergence, Replies, compare, divergence, replies
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.request import RowToken, TopLogprob

PROMPTS = [[5, 6, 7] * 6, [9, 10] * 9, [3, 4, 5, 6] * 5]


def reference(*tokens: int, gap: float = 0.5) -> list[RowToken]:
    """Each token leads the one after it by `gap`; 99 is far below."""
    return [
        RowToken(0, token, -0.5, (TopLogprob(token, -0.5), TopLogprob(token + 1, -0.5 - gap)))
        for token in tokens
    ]


def plain(*tokens: int) -> list[RowToken]:
    return [RowToken(0, token) for token in tokens]


def test_equal_replies_do_not_part() -> None:
    assert divergence(0, plain(1, 2, 3), reference(1, 2, 3)) is None


def test_a_divergence_has_its_place_and_by_how_much_the_reference_led() -> None:
    found = divergence(4, plain(1, 3, 9), reference(1, 2, 3))
    assert found == Divergence(4, 1, 0.5)


@pytest.mark.parametrize(
    ("ours", "place"),
    [(plain(1, 2), 2), (plain(1, 2, 3, 4), 3), (plain(1, 99, 3), 1)],
    ids=["too short", "too long", "not among the likely"],
)
def test_what_no_near_tie_explains_has_an_infinite_gap(ours: list[RowToken], place: int) -> None:
    assert divergence(0, ours, reference(1, 2, 3)) == Divergence(0, place, float("inf"))


def test_near_ties_are_told_apart_from_failures() -> None:
    ours = Replies([plain(1, 2), plain(1, 3), plain(2, 2)], 2.5, 7)
    wanted = Replies([reference(1, 2), reference(1, 2, gap=1e-6), reference(1, 2)])
    found = compare(ours, wanted, 1e-4)
    assert (found.prompts, found.equal, found.accept_length, found.rounds) == (3, 1, 2.5, 7)
    assert [one.prompt for one in found.near_ties] == [1]
    assert [one.prompt for one in found.failures] == [2]
    assert not found.ok
    assert compare(ours, wanted, 1.0).ok


def ask(runtime: LLMInferenceRuntime, *, logprobs: bool) -> Replies:
    ticks: list[None] = []
    found = replies(
        runtime, PROMPTS, 2, max_tokens=30, logprobs=logprobs, tick=lambda: ticks.append(None)
    )
    assert len(ticks) == 2
    return found


def test_replies_come_in_the_order_of_the_prompts(runtimes: list[LLMInferenceRuntime]) -> None:
    vanilla, ours = ask(runtimes[0], logprobs=True), ask(runtimes[1], logprobs=False)
    assert (vanilla.accept_length, vanilla.rounds) == (None, 0)
    assert ours.rounds > 0
    assert ours.accept_length is not None
    assert ours.accept_length >= 1
    found = compare(ours, vanilla, 1e-4)
    assert found.ok
    assert found.equal == 3


def test_a_token_that_was_not_picked_is_found(runtimes: list[LLMInferenceRuntime]) -> None:
    vanilla, ours = ask(runtimes[0], logprobs=True), ask(runtimes[1], logprobs=False)
    wrong = ours.rows[1][5]
    ours.rows[1][5] = RowToken(1, (wrong.token_id + 1) % 100)
    (failure,) = compare(ours, vanilla, 1e-4).failures
    assert (failure.prompt, failure.place) == (1, 5)
