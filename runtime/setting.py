"""The declaration of a setting: a field of the struct that its owner holds, annotated with this."""

from collections.abc import Callable
from typing import NamedTuple

from msgspec import Meta


class Declared(NamedTuple):
    """The traits of a setting beside its name, type, default and range.

    One that `reloads` takes effect in a daemon that runs. An `expert` one is needed by no guide but
    docs/configuration.md. A `path` of a file begins at that file's folder. `parse` makes its value
    of a text, or raises ValueError, with a reason where `form`, which tells such texts in words,
    does not have it.
    """

    description: str
    reloads: bool
    expert: bool
    path: bool
    parse: Callable[[str], object] | None
    form: str


def setting(
    description: str,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    reloads: bool = False,
    expert: bool = False,
    path: bool = False,
    parse: Callable[[str], object] | None = None,
    form: str = "text",
) -> Meta:
    """Declare the annotated field a setting that users give by its encoded name."""
    extra = {"setting": Declared(description, reloads, expert, path, parse, form)}
    if gt is None:
        return Meta(ge=ge, le=le, extra=extra)
    return Meta(gt=gt, le=le, extra=extra)
