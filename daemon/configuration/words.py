"""A setting's type in words, for messages, `--help` and the documentation."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

import msgspec


def allowed(kind: Any, form: str = "text") -> str:
    """Describe the values that a setting of this type may have; `form` describes texts."""
    annotation = msgspec.inspect.type_info(kind)
    if isinstance(annotation, msgspec.inspect.Metadata):
        annotation = annotation.type
    match annotation:
        case msgspec.inspect.LiteralType(values=values):
            return "one of " + ", ".join(str(value) for value in values)
        case msgspec.inspect.BoolType():
            return "true or false"
        case msgspec.inspect.IntType(ge=low, le=high):
            return f"a whole number from {low} to {high}"
        case msgspec.inspect.FloatType(ge=low, gt=above, le=high):
            return f"a number {f'from {low}' if above is None else f'above {above}'} to {high}"
        case _:
            return form


def shown(default: object) -> str:
    """A default value as a settings file has it."""
    return msgspec.json.encode("" if default is None else default).decode()


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """`` (nearest: threads)`` for a name that is nearly one of `known`, else nothing.

    A `prefix` that all of them have makes none alike.
    """
    own = [one.removeprefix(prefix) for one in known]
    near = get_close_matches(name.removeprefix(prefix), own, n=1)
    return f" (nearest: {prefix}{near[0]})" if near else ""
