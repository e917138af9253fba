"""Settings of version 0.1 that are taken for one version more: the sizes of the draft's tree."""

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta

from runtime.errors import HearthError
from runtime.options import EagleDraftingConfig

OLD_NAMES: dict[str, Any] = {
    "drafting_top_k": Annotated[int, Meta(ge=0, le=128)],
    "drafting_step": Annotated[int, Meta(ge=0, le=30)],
    "verify_tree_size": Annotated[int, Meta(ge=0, le=128)],
}
"""Their types; 0 is as if it were not given."""


def tree_of(sizes: Mapping[str, int]) -> EagleDraftingConfig | None:
    """The tree of these sizes by old name; raises `invalid_value` where one is missing."""
    missing = [name for name in OLD_NAMES if not sizes.get(name)]
    if len(missing) == len(OLD_NAMES):
        return None
    if missing:
        names = ", ".join(OLD_NAMES)
        raise HearthError(
            "invalid_value",
            f"{missing[0]} is not given: the draft's tree needs {names} together; draft_tree is "
            "all three",
            missing[0],
        )
    return EagleDraftingConfig(**sizes)


def warning_of(tree: EagleDraftingConfig | None) -> str:
    """Tell what to give in the place of the old names."""
    names, text = ", ".join(OLD_NAMES), "" if tree is None else str(tree)
    return f'{names} are taken by this version for the last time: give draft_tree = "{text}"'
