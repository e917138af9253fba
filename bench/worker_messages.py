"""What the bench and its worker processes say to one another: one JSON object per line."""

from typing import Literal

import msgspec

Contender = Literal[
    "floor", "hearth", "transformers", "llama_cpp", "static_cache", "torch_compile", "gpu_floor"
]
Device = Literal["cpu", "cuda"]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker loads: `path` by contender, `prompt` as token ids, room for `steps` steps.

    `precision` is one of `transformers_model.PRECISIONS`, or empty for the fastest of them.
    `bytes` is the size of the floor's buffer; `spin` is Hearth's setting, None for its default.
    `batch` rows have the same prompt; `capture` prepares Hearth's graphs as the executor does.
    `device` and `capacity`, the slots of a static cache, are for the peers on a GPU.
    """

    contender: Contender
    path: str = ""
    threads: int = 1
    prompt: list[int] = []
    steps: int = 0
    precision: str = ""
    bytes: int = 0
    spin: bool | None = None
    batch: int = 1
    capture: bool = False
    device: Device = "cpu"
    capacity: int = 0


class Advance(msgspec.Struct, frozen=True):
    """Take this many steps, each timed on its own, `pause_s` of untimed waiting before each.

    `raw` launches the engine's newest step that often instead, with no work around it, and gives
    the time of them all as one; its contender must be Hearth.
    """

    steps: int
    pause_s: float = 0.0
    raw: bool = False


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
