import pytest
from msgspec import structs

from hearth.bench.prefix.command import Round, prefix_figures, shared_figures
from hearth.runtime.request import RowToken, TopLogprob


def reply(*tokens: int, logprob: float = -0.5) -> list[RowToken]:
    top = (TopLogprob(7, logprob), TopLogprob(8, logprob - 0.05))
    return [RowToken(0, token, logprob, top) for token in tokens]


ROUND = Round(1.1, 0.15, 1.0, 0.1, 64, reply(7, 9), reply(7, 9))


def test_what_is_saved_is_of_the_time_that_shared_tokens_take() -> None:
    found = shared_figures([ROUND, ROUND._replace(with_s=9.0), ROUND], None)
    assert found.saved_share == pytest.approx(1 - 0.05 / 0.9)
    assert [found.ttft_ratio, found.fill_cost] == pytest.approx([0.15, 1.1])
    assert (found.without_ms, found.with_ms, found.own_ms) == (1000, 150, 100)
    assert (found.reused, found.equal, found.largest_difference) == (64, 1.0, 0.0)


def test_the_lowest_share_counts_and_the_ratio_is_that_of_1024_tokens() -> None:
    short = shared_figures([ROUND], None)
    long = structs.replace(short, saved_share=0.5, ttft_ratio=0.25)
    found = prefix_figures({64: short, 1024: long}, 96.0, exact=True)
    assert (found.saved_share, found.ttft_ratio_1024, found.bytes_per_token) == (0.5, 0.25, 96.0)
    assert not found.within_aim
    found = prefix_figures({64: short}, 96.0, exact=True)
    assert found.ttft_ratio_1024 is None
    assert found.within_aim


@pytest.mark.parametrize(
    ("ours", "exact", "near"),
    [
        (reply(7, 9), True, True),
        (reply(7, 9, logprob=-0.4999), False, True),
        (reply(8, 9), False, True),
        (reply(6, 9), False, False),
        (reply(7), False, False),
    ],
)
def test_replies_are_equal_bit_for_bit_or_but_for_near_ties(
    ours: list[RowToken], *, exact: bool, near: bool
) -> None:
    given = ROUND._replace(reply=ours)
    assert shared_figures([given], None).equal == exact
    assert shared_figures([given], 0.1).equal == near


def test_log_probabilities_are_compared_up_to_the_first_other_token() -> None:
    given = ROUND._replace(reply=[*reply(7, logprob=-0.25), *reply(8, logprob=-3.0)])
    assert shared_figures([given], 0.1).largest_difference == 0.25
