"""Requests to the runtime, their limits, and their results."""

import secrets
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from msgspec.inspect import FloatType, IntType, Type, UnionType, type_info

from hearth.runtime.errors import HearthError
from hearth.runtime.images import EmbeddedImage

FinishReason = Literal["stop", "length", "cancelled"]
CacheUse = Literal["use", "bypass", "pin"]
"""Use of the prefix cache by a request; "pin" also keeps its prompt there."""


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Options of a request, carried as one from the front door to its row.

    The defaults are greedy decoding. `max_tokens` None is as many as fit; it counts all generated
    tokens, those of a row that was put back included. `top_k` 0, `top_p` 1 and `min_p` 0 switch the
    filters off. `logit_bias` has pairs of token and bias. `logprobs` is the number of most likely
    tokens reported beside the chosen one; None reports none at all. `speculation` None leaves it to
    the runtime's policy; True is refused where none is possible. `seed` None is 0. `adapter` is
    the name of a LoRA adapter, "" for none. What the prefix cache keeps of requests is shared by
    those of equal `cache_salt` alone.
    """

    max_tokens: int | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 0.0
    top_k: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100.0)] = 1.0
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    speculation: bool | None = None
    adapter: str = ""
    cache: CacheUse = "use"
    cache_salt: str = ""


_BIAS = FloatType(ge=-100.0, le=100.0)


def _bounds(kind: Type) -> IntType | FloatType | None:
    """The numbers that a field takes; None when it is no number or has no bounds."""
    if isinstance(kind, UnionType):
        return next((found for part in kind.types if (found := _bounds(part))), None)
    return kind if isinstance(kind, (IntType, FloatType)) and kind.le is not None else None


_FIELDS = type_info(RequestOptions).fields  # type: ignore[attr-defined] # of a struct
_BOUNDS = {field.name: found for field in _FIELDS if (found := _bounds(field.type))}


def check_options(options: RequestOptions, vocab_size: int | None = None) -> None:
    """Refuse a setting outside its range with `invalid_value` and its name as the field.

    What depends on the vocabulary is left out where its size is not known.
    """
    for name, bounds in _BOUNDS.items():
        value = getattr(options, name)
        if value is not None:
            _check(name, value, bounds)
    if options.logprobs is not None and vocab_size is not None:
        _check("logprobs", options.logprobs, IntType(ge=0, le=vocab_size))
    seen: set[int] = set()
    for index, (token_id, bias) in enumerate(options.logit_bias):
        if token_id in seen:
            field = f"logit_bias[{index}][0]"
            raise HearthError("invalid_value", f"{field} names a token a second time", field)
        seen.add(token_id)
        if vocab_size is not None and not 0 <= token_id < vocab_size:
            raise HearthError(
                "invalid_value",
                f"logit_bias names token {token_id}, the model has tokens 0 to {vocab_size - 1}",
                "logit_bias",
            )
        _check("logit_bias", bias, _BIAS)


def seeded(options: RequestOptions) -> RequestOptions:
    """The options with a seed of their own where none is given, so that texts differ."""
    if options.seed is not None:
        return options
    return msgspec.structs.replace(options, seed=secrets.randbits(63))


def _check(name: str, value: float, bounds: IntType | FloatType) -> None:
    low, high = bounds.gt if bounds.ge is None else bounds.ge, bounds.le
    # Written so that a NaN, which compares with nothing, is refused as well.
    if low is None or high is None or not low <= value <= high or value == bounds.gt:
        least = "at least" if bounds.gt is None else "above"
        raise HearthError(
            "invalid_value",
            f"{name} must be {least} {_shown(low)} and at most {_shown(high)}",
            name,
        )


def _shown(bound: float | None) -> str:
    # The bounds of whole numbers are exact: no digit of them is left out.
    return f"{bound:g}" if isinstance(bound, float) else str(bound)


class RowRequest(msgspec.Struct, kw_only=True, array_like=True):
    """One row: token ids so far, how many of them are prompt, and what it asks.

    `token_ids` may already hold generated tokens (a row that was put back at the hold limit);
    sampling depends on the position alone, so it continues as if it had never paused. `images`
    stand in the prompt, in its order: the ids at their places count for nothing. What the row pins
    in the prefix cache is pinned for `client`.
    """

    token_ids: list[int]
    prompt_length: int
    options: RequestOptions = RequestOptions()
    images: list[EmbeddedImage] = []
    client: int = 0


class TopLogprob(msgspec.Struct, frozen=True, array_like=True):
    """One alternative token and its natural-log probability at temperature 1."""

    token_id: int
    logprob: float


NO_ROW = -1
"""Number of the row of a token that its row has not taken yet."""


class RowToken(msgspec.Struct, array_like=True, omit_defaults=True):
    """One token of one row, from the sampler on.

    The sampler sets `logprob` and `top` where the row asks for them, and `token_id` to -1 where it
    has only checked the row. The row that takes it sets `row`, its number, and `finish` on its last
    token. `error` (a code) replaces the token when the row failed: then `token_id` is -1 and
    nothing follows.
    """

    row: int
    token_id: int
    logprob: float | None = None
    top: tuple[TopLogprob, ...] = ()
    finish: FinishReason | None = None
    error: str | None = None


class RowRound(msgspec.Struct, frozen=True, array_like=True):
    """Result of a round of speculation for one row.

    `drafted` counts the nodes beyond the root, `accepted` the tokens that the round gave the row.
    """

    row: int
    drafted: int
    accepted: int


class GenerationRequest(msgspec.Struct, kw_only=True):
    """Rows for `handle_request`, which run together."""

    rows: list[RowRequest]


class GeneratedRow(msgspec.Struct, kw_only=True):
    """The outcome of one row, in the order of the request; the end token is included."""

    token_ids: list[int]
    text: str
    logprobs: list[float]
    finish_reason: FinishReason | None
    top_logprobs: list[tuple[TopLogprob, ...]] = []
    error: str | None = None


class GenerationResponse(msgspec.Struct, kw_only=True):
    """All rows of a request and the seconds spent by stage."""

    rows: list[GeneratedRow]
    prefill_s: float
    decode_s: float
    steps: int
