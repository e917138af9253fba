"""Record of a finished generation, for metrics, log and traces alike."""

import time
from collections.abc import Callable

import msgspec
import structlog

from hearth.actors.messages import ImageTimes
from hearth.daemon.door.sessions import OpenRequest
from hearth.runtime.request import RequestOptions
from hearth_client.protocol import ImageUsage

_log = structlog.get_logger("hearth.door")


class FinishedRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A generation that has ended; times in seconds, `opened` by the monotonic clock.

    Five stages follow one another from `opened` on: `tokenize_s` until the prompt's ids were there,
    `images_s` until the embeddings of its images were, `queue_s` until it got a place, `prefill_s`
    until its first token, `decode_s` until its last; each is 0 where it was not ended.
    `detokenize_s`, within and behind decoding, is how long its tokens took to become text.
    `ttft_s` is when its first token left for the client, after `opened`. `client` is the client's
    own text. `reason` is that of `done`, the code of an error, or why its session ended; `failed`
    is true for all but the first. `chat` is true for a conversation, false for a prompt. `images`
    is that of `done`. `options` hold text of the client, `stop`: records that are kept leave them
    out. `cached_tokens` of the prompt came from the prefix cache.
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
    images_s: float = 0.0
    images: ImageUsage | None = None
    cached_tokens: int = 0

    @property
    def adapter(self) -> str:
        """The name of its adapter, "" for none."""
        return "" if self.options is None else self.options.adapter


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
        queue_s=max(0.0, request.queued_s - request.tokenize_s - request.images_s),
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
        images_s=request.images_s,
        images=images_of(request),
        cached_tokens=request.cached_tokens,
    )


def images_of(request: OpenRequest) -> ImageUsage | None:
    """Usage of a request's images; None where it has none."""
    if not request.images:
        return None
    embedded, times = request.embedded, ImageTimes()
    if embedded is not None:
        times = embedded.times
    return ImageUsage(
        count=len(request.images),
        tokens=embedded.tokens if embedded else 0,
        cached=embedded.cached if embedded else 0,
        sizes=embedded.sizes if embedded else [],
        decode_ms=milliseconds(times.decode_s),
        resize_ms=milliseconds(times.resize_s),
        engine_ms=milliseconds(times.engine_s),
    )


def log_finished(ended: FinishedRequest) -> None:
    """One line for each request; no text of prompt or reply is in it."""
    _log.info(
        "request",
        request=ended.request,
        client=ended.client,
        reason=ended.reason,
        prompt_tokens=ended.prompt_tokens,
        cached_tokens=ended.cached_tokens,
        completion_tokens=ended.completion_tokens,
        tokenize_ms=milliseconds(ended.tokenize_s),
        **({"adapter": ended.adapter} if ended.adapter else {}),
        **_image_fields(ended),
        queue_ms=milliseconds(ended.queue_s),
        prefill_ms=milliseconds(ended.prefill_s),
        decode_ms=milliseconds(ended.decode_s),
        detokenize_ms=milliseconds(ended.detokenize_s),
        total_ms=milliseconds(ended.total_s),
        **({"traceparent": ended.traceparent} if ended.traceparent else {}),
    )


def _image_fields(ended: FinishedRequest) -> dict[str, float]:
    if ended.images is None:
        return {}
    images = ended.images
    return {
        "images": images.count,
        "image_tokens": images.tokens,
        "images_cached": images.cached,
        "images_ms": milliseconds(ended.images_s),
    }


def milliseconds(seconds: float) -> float:
    """Milliseconds as people and clients get them, to a microsecond."""
    return round(seconds * 1000, 3)
