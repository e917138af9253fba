"""What is known of a generation once it has ended: one record for all who count, log or draw."""

import time
from collections.abc import Callable

import msgspec
import structlog

from daemon.door.sessions import OpenRequest
from runtime.request import RequestOptions

_log = structlog.get_logger("hearth.door")


class FinishedRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A generation that has ended; times in seconds, `opened` by the monotonic clock.

    Four stages follow one another from `opened` on: `tokenize_s` until the prompt's ids were there,
    `queue_s` until it got a place, `prefill_s` until its first token, `decode_s` until its last;
    each is 0 where it was not ended. `detokenize_s` lies within and behind decoding: how long its
    tokens took to become text. `ttft_s` is when its first token left for the client, after
    `opened`. `client` is the client's own text. `reason` is that of `done`, the code of an error,
    or why its session ended; `failed` is true for all but the first. `chat` tells a conversation
    from a prompt. `options` hold text of the client, `stop`: who keeps records leaves them out.
    """

    request: str
    client: str
    reason: str
    failed: bool
    opened: float
    prompt_tokens: int
    completion_tokens: int
    tokenize_s: float
    queue_s: float
    prefill_s: float
    decode_s: float
    detokenize_s: float
    ttft_s: float | None
    total_s: float
    rounds: int
    drafted: int
    accepted_tokens: int
    chat: bool = False
    traceparent: str | None = None
    options: RequestOptions | None = None


Listener = Callable[[FinishedRequest], None]
"""Hears of every generation that has ended, on the door's loop: it must not wait."""


def finished(request: OpenRequest, name: str, reason: str, *, failed: bool) -> FinishedRequest:
    """The record of a request that ends now; `name` is its id in the whole daemon."""
    return FinishedRequest(
        request=name,
        client=request.session.client,
        reason=reason,
        failed=failed,
        opened=request.opened,
        prompt_tokens=request.prompt_tokens,
        completion_tokens=request.completion_tokens,
        tokenize_s=request.tokenize_s,
        queue_s=max(0.0, request.queued_s - request.tokenize_s),
        prefill_s=request.prefill_s,
        decode_s=request.last_token - request.first_token,
        detokenize_s=request.detokenize_s,
        ttft_s=request.first_left - request.opened if request.first_left else None,
        total_s=time.monotonic() - request.opened,
        rounds=request.rounds,
        drafted=request.drafted,
        accepted_tokens=request.accepted_tokens,
        chat=request.chat,
        traceparent=request.traceparent,
        options=request.options,
    )


def log_finished(ended: FinishedRequest) -> None:
    """One line for each request; no text of prompt or reply is in it."""
    _log.info(
        "request",
        request=ended.request,
        client=ended.client,
        reason=ended.reason,
        prompt_tokens=ended.prompt_tokens,
        completion_tokens=ended.completion_tokens,
        tokenize_ms=milliseconds(ended.tokenize_s),
        queue_ms=milliseconds(ended.queue_s),
        prefill_ms=milliseconds(ended.prefill_s),
        decode_ms=milliseconds(ended.decode_s),
        detokenize_ms=milliseconds(ended.detokenize_s),
        total_ms=milliseconds(ended.total_s),
        **({"traceparent": ended.traceparent} if ended.traceparent else {}),
    )


def milliseconds(seconds: float) -> float:
    """As people and clients are told times: to a microsecond."""
    return round(seconds * 1000, 3)
