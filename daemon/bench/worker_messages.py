"""What the bench and its worker processes say to one another: one JSON object per line."""

from typing import Literal

import msgspec

Contender = Literal["floor", "hearth", "transformers", "llama_cpp"]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker loads: `path` by contender, `prompt` as token ids, room for `steps` steps.

    `precision` is one of `transformers_model.PRECISIONS`, or empty for the fastest of them.
    `bytes` is the size of the floor's buffer; `spin` is Hearth's setting, None for its default.
    """

    contender: Contender
    path: str = ""
    threads: int = 1
    prompt: list[int] = []
    steps: int = 0
    precision: str = ""
    bytes: int = 0
    spin: bool | None = None


class Advance(msgspec.Struct, frozen=True):
    """Take this many steps, each timed on its own."""

    steps: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded and the prompt is in its cache; `token` is the first answer."""

    token: int
    precision: str = ""


class Timed(msgspec.Struct, frozen=True, tag=True):
    """Seconds and token of every step."""

    seconds: list[float]
    tokens: list[int]


class Unavailable(msgspec.Struct, frozen=True, tag=True):
    """The contender cannot run here; `reason` is one sentence."""

    reason: str


Reply = Ready | Timed | Unavailable
