import pytest

from hearth.runtime.errors import HearthError
from hearth.runtime.options import EagleDraftingConfig, SpeculationOptions, check_speculation


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
