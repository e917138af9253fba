"""The marks of reasoning and calls in a model's replies, as data."""

from typing import Literal

import msgspec


class CallForm(msgspec.Struct, frozen=True, omit_defaults=True):
    """Spelling of calls: marks around them, and how name and arguments lie between.

    `section` encloses all calls of a turn that lie side by side, `call` each of them; either may be
    empty. `kind` is "json" (one JSON object with `name_key` and `arguments_key`; with an empty
    `name_key` the name is the key of the arguments), "named" (a name, then its arguments as JSON),
    "tagged" (a name, then each argument between marks), "python" (`f(a=1)`) or "bare"
    (`f{a:1}`, keys without quotes).

    A head is `call[0]`, the id and `id_close` with `id_place` "before", the name and `name_close`,
    and up to `head_close`, if any, the id with `id_place` "after", or what is of no use. An
    argument is `key_open`, its name, `key_close`, up to `value_open`, if any, its type, the value
    and `value_close`. `quote` encloses text in the dialect of "bare".

    A reply of "channels" is messages: a head, `head_close` and a body up to one of `section` or
    `call[1]`. It is a call where the head has `call[0]` and a name, reasoning where it has
    `key_open`, else text.
    """

    kind: Literal["json", "named", "tagged", "python", "bare", "channels"]
    section: tuple[str, str] = ("", "")
    call: tuple[str, str] = ("", "")
    separator: str = ""
    name_key: str = "name"
    arguments_key: str = "arguments"
    id_key: str = ""
    id_place: Literal["", "before", "after"] = ""
    id_close: str = ""
    name_close: str = ""
    head_close: str = ""
    key_open: str = ""
    key_close: str = ""
    value_open: str = ""
    value_close: str = ""
    quote: str = ""


class ReplyFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    """Marks of a model's replies: around its reasoning, and around its calls.

    Empty marks, and None for `calls`, say that the model has none. `source` tells how it was found:
    "setting", "response_template", "known", "probe", or "own" where Hearth describes its own form
    to the model.
    """

    name: str
    source: Literal["setting", "response_template", "known", "probe", "own"]
    reasoning: tuple[str, str] = ("", "")
    calls: CallForm | None = None


def marks_of(shape: ReplyFormat) -> list[str]:
    """All that stands in a reply beside what the model says: its special tokens are looked for."""
    form = shape.calls
    if form is None:
        return [*shape.reasoning]
    found = [*shape.reasoning, *form.section, *form.call, form.section[0] + form.call[0]]
    found += [form.separator, form.id_close, form.name_close, form.head_close, form.key_open]
    return [*found, form.key_close, form.value_open, form.value_close, form.quote]
