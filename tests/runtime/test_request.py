import math

import pytest

from hearth.runtime.errors import HearthError
from hearth.runtime.options import EagleDraftingConfig, SpeculationOptions, check_speculation
from hearth.runtime.request import RequestOptions, check_options

VOCAB = 50


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.01),
        ("min_p", math.nan),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -math.inf),
        ("logit_bias", ((VOCAB, 1.0),)),
        ("logit_bias", ((-1, 1.0),)),
        ("logit_bias", ((3, math.nan),)),
        ("logit_bias", ((3, 100.5),)),
        ("seed", -1),
        ("seed", 1 << 63),
        ("logprobs", -1),
        ("logprobs", 21),
    ],
)
def test_a_setting_outside_its_range_is_named(field: str, value: object) -> None:
    params = RequestOptions(**{field: value})  # type: ignore[arg-type] # wrong on purpose
    with pytest.raises(HearthError) as caught:
        check_options(params, VOCAB)
    assert caught.value.code == "invalid_value"
    assert caught.value.field == field
    assert field in caught.value.message


@pytest.mark.parametrize(
    ("field", "told"),
    [
        ("seed", "at least 0 and at most 9223372036854775807"),
        ("top_k", "at least 0 and at most 1048576"),
        ("top_p", "above 0 and at most 1"),
        ("repetition_penalty", "at least 0.01 and at most 100"),
    ],
)
def test_the_range_is_told_to_the_last_digit(field: str, told: str) -> None:
    with pytest.raises(HearthError) as caught:
        check_options(RequestOptions(**{field: -1}), VOCAB)  # type: ignore[arg-type] # likewise
    assert caught.value.message == f"{field} must be {told}"


def test_more_logprobs_than_tokens_are_refused() -> None:
    check_options(RequestOptions(logprobs=5), 5)
    with pytest.raises(HearthError, match="logprobs"):
        check_options(RequestOptions(logprobs=6), 5)


def test_the_ends_of_every_range_are_inside() -> None:
    check_options(RequestOptions(), VOCAB)
    check_options(
        RequestOptions(
            temperature=100.0,
            top_k=1 << 20,
            top_p=1e-300,
            min_p=1.0,
            repetition_penalty=0.01,
            presence_penalty=-2.0,
            frequency_penalty=2.0,
            logit_bias=((0, -100.0), (VOCAB - 1, 100.0)),
            seed=(1 << 63) - 1,
            logprobs=20,
        ),
        VOCAB,
    )


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (SpeculationOptions(lookup_tokens=-1), "lookup_tokens"),
        (SpeculationOptions(lookup_tokens=31), "lookup_tokens"),
        (SpeculationOptions(lookup_shortest=0), "lookup_shortest"),
        (SpeculationOptions(lookup_ngram=1), "lookup_shortest"),
        (SpeculationOptions(eagle=EagleDraftingConfig(drafting_top_k=0)), "drafting_top_k"),
        (SpeculationOptions(eagle=EagleDraftingConfig(drafting_step=0)), "drafting_step"),
        (SpeculationOptions(eagle=EagleDraftingConfig(drafting_step=31)), "drafting_step"),
        (SpeculationOptions(eagle=EagleDraftingConfig(verify_tree_size=1)), "verify_tree_size"),
        (SpeculationOptions(eagle=EagleDraftingConfig(verify_tree_size=129)), "verify_tree_size"),
    ],
)
def test_an_option_without_meaning_is_named(options: SpeculationOptions, field: str) -> None:
    with pytest.raises(HearthError) as caught:
        check_speculation(options)
    assert (caught.value.code, caught.value.field) == ("invalid_value", field)


def test_the_limits_themselves_pass() -> None:
    largest = EagleDraftingConfig(drafting_top_k=1, drafting_step=30, verify_tree_size=128)
    smallest = EagleDraftingConfig(drafting_top_k=1, drafting_step=1, verify_tree_size=2)
    for eagle in (None, largest, smallest):
        check_speculation(SpeculationOptions(eagle=eagle, lookup_tokens=30, lookup_shortest=3))


def test_sizes_of_a_tree_follow_from_its_shape() -> None:
    tree = EagleDraftingConfig(drafting_top_k=4, drafting_step=3, verify_tree_size=60)
    assert (tree.proposal_size, tree.table_size, tree.most_accepted) == (12, 37, 4)
    # No more nodes than were ever scored.
    assert tree.tree_size == 37
