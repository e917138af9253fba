from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from actors.messages import ExecutorLimits
from actors.waiting_queue import Entry
from runtime.errors import Code


class PolicySettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the scheduler may do; times in seconds, `queue_tokens` in prompt tokens.

    Rows that are "joining" take any place that frees; "synchronous" ones run in batches, of which
    the next begins when all rows of the one before have ended.
    """

    batching: Literal["joining", "synchronous"] = "joining"

    fill_wait_s: float = 0.005
    hold_s: float = 2.0
    queue_requests: int = 256
    queue_tokens: int = 65536
    ageing_s: float = 5.0


class Refusal(NamedTuple):
    """Why a request gets no place: a code, our sentence and the field or limit at fault."""

    code: Code
    message: str
    field: str | None


def queue_refusal(
    entry: Entry, requests: int, tokens: int, settings: PolicySettings
) -> Refusal | None:
    """Whether there is room for the request behind those that wait; None when there is."""
    if requests >= settings.queue_requests:
        return Refusal(
            "queue_full",
            f"{requests} requests wait already, the limit is {settings.queue_requests}: "
            "try again later",
            "queue_requests",
        )
    waiting = tokens + entry.prompt_tokens
    if waiting > settings.queue_tokens:
        return Refusal(
            "queue_full",
            f"with this request {waiting} prompt tokens would wait, the limit is "
            f"{settings.queue_tokens}: try again later",
            "queue_tokens",
        )
    return None


def size_refusal(
    entry: Entry, settings: PolicySettings, limits: ExecutorLimits | None
) -> Refusal | None:
    """Whether a row of the executor can hold the request; None when it can.

    While no executor has told its limits, only those of the queue are known.
    """
    length = entry.prompt_tokens
    if length == 0:
        return Refusal("prompt_empty", "the prompt has no tokens: send some text", "prompt")
    longest = settings.queue_tokens
    if limits is not None:
        longest = min(longest, limits.max_prompt_tokens)
    if length > longest:
        return Refusal(
            "prompt_too_long",
            f"the prompt has {length} tokens, at most {longest} are possible: shorten it",
            "prompt",
        )
    # Without max_tokens a request takes what fits, and one token at least.
    wanted = entry.request.options.max_tokens or 1
    if limits is not None and length + wanted > limits.max_total_tokens:
        return Refusal(
            "capacity_exceeded",
            f"{length} prompt tokens and max_tokens {wanted} are more than the "
            f"{limits.max_total_tokens} tokens that fit: ask for at most "
            f"{limits.max_total_tokens - length}",
            "max_tokens",
        )
    return None
