"""Sections of the settings that actors read.

They are apart from their owners, so that a command that reads settings does not import those.
"""

from typing import Annotated, Generic, Literal, TypeVar

import msgspec

from hearth.runtime.setting import setting

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["auto", "console", "json"]
Section = TypeVar("Section")


class Reloadable(Generic[Section]):
    """A section of the settings, held by all who read it: a reload swaps `current`."""

    __slots__ = ("current",)

    def __init__(self, current: Section) -> None:
        self.current = current


class PolicySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and times of the scheduler; `within_share` applies `client_queue_share`."""

    batching: Annotated[
        Literal["joining", "synchronous"],
        setting(
            "`joining`: a request takes any place that is free, between two steps of the others. "
            "`synchronous`: a batch keeps the requests that it began with until all have ended, "
            "at most for `hold_s` where others wait.",
            reloads=True,
            expert=True,
        ),
    ] = "joining"
    fill_wait_ms: Annotated[
        float,
        setting(
            "Milliseconds an idle executor waits for more rows, unless requests have long come "
            "one at a time.",
            ge=0,
            le=1000,
            reloads=True,
            expert=True,
        ),
    ] = 5.0
    hold_s: Annotated[
        float,
        setting(
            "How long a reply may hold its place while others wait and none is free; it then "
            "pauses and continues later.",
            gt=0,
            le=3600,
            reloads=True,
        ),
    ] = 30.0
    adapter_turn_ms: Annotated[
        float,
        setting(
            "Milliseconds for which the requests of one adapter keep all places while others "
            "wait for another one, or have none; fewer of them give way earlier.",
            gt=0,
            le=3600000,
            reloads=True,
            expert=True,
        ),
    ] = 500.0
    ageing_s: Annotated[
        float,
        setting(
            "Waiting time after which a request counts as one priority higher.",
            gt=0,
            le=3600,
            expert=True,
        ),
    ] = 5.0
    queue_requests: Annotated[
        int, setting("Requests that may wait; more are refused.", ge=1, le=1 << 20, reloads=True)
    ] = 256
    queue_tokens: Annotated[
        int,
        setting("Prompt tokens that may wait; more are refused.", ge=1, le=1 << 30, reloads=True),
    ] = 65536
    client_queue_share: Annotated[
        float,
        setting(
            "The share of what may wait, in requests and prompt tokens, that one client takes at "
            "most; less where others wait too, so that there is room for newcomers.",
            gt=0,
            le=1,
            reloads=True,
            expert=True,
        ),
    ] = 0.75

    @property
    def synchronous(self) -> bool:
        """True if a batch begins only when all rows of the one before have ended."""
        return self.batching == "synchronous"

    @property
    def fill_wait_s(self) -> float:
        """`fill_wait_ms` in seconds."""
        return self.fill_wait_ms / 1000

    @property
    def adapter_turn_s(self) -> float:
        """`adapter_turn_ms` in seconds."""
        return self.adapter_turn_ms / 1000


class EncoderOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the encoder and of image decoding."""

    image_cache_bytes: Annotated[
        int,
        setting(
            "Bytes of embeddings that are kept in case their picture comes again; those of open "
            "requests stay, and what finds no room beside them is refused.",
            ge=1 << 20,
            le=1 << 36,
        ),
    ] = 256 << 20
    nice: Annotated[
        int,
        setting(
            "By how much the encoder's processes give way to text (nice(2)).",
            ge=0,
            le=19,
            expert=True,
        ),
    ] = msgspec.field(default=10, name="encoder_nice")
    threads: Annotated[
        int,
        setting(
            "Threads of a vision tower on the CPU; 0 for all physical cores.",
            ge=0,
            le=1024,
            expert=True,
        ),
    ] = msgspec.field(default=0, name="encoder_threads")
    image_decode_timeout_s: Annotated[
        float, setting("How long one picture may take to be decoded.", gt=0, le=3600, expert=True)
    ] = 10.0
    image_decode_memory_bytes: Annotated[
        int,
        setting(
            "Bytes of memory that the process which decodes pictures may take.",
            ge=1 << 26,
            le=1 << 36,
            expert=True,
        ),
    ] = 1 << 30


class LogSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Level and format of the logs of the daemon and the processes that it starts."""

    log_level: Annotated[
        Level, setting("The least important events that are logged.", reloads=True)
    ] = "info"
    log_format: Annotated[
        Format,
        setting(
            "`auto` is console on a terminal, fields under journald, else JSON lines.", expert=True
        ),
    ] = "auto"
