"""What a caller asks of the runtime and what comes back; plain data without behaviour."""

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "cancelled"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one row picks its tokens; the defaults are greedy decoding.

    `top_k` 0, `top_p` 1 and `min_p` 0 switch the filters off. `logprobs` is the number of most
    likely tokens reported beside the chosen one; None reports none at all.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int = 0
    logprobs: int | None = None


class RowRequest(msgspec.Struct, kw_only=True):
    """One row of a batch: token ids so far, how many of them are prompt, and its settings.

    `token_ids` may already hold generated tokens (a row that was put back at the hold limit);
    sampling depends on the position alone, so it continues as if it had never paused.
    `max_tokens` counts all generated tokens, those already in `token_ids` included.
    `speculation` None leaves it to the runtime's policy; True is refused where none is possible.
    """

    token_ids: list[int]
    prompt_length: int
    max_tokens: int
    sampling: SamplingParams = SamplingParams()
    ignore_eos: bool = False
    speculation: bool | None = None


class TopLogprob(msgspec.Struct, frozen=True, array_like=True):
    """One alternative token and its natural-log probability at temperature 1."""

    token_id: int
    logprob: float


class RowToken(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """One token of one row; `row` is the row's index in the order the batch was given.

    `finish` is set on the row's last token. `error` (a code) replaces the token when the row
    failed: then `token_id` is -1 and nothing follows.
    """

    row: int
    token_id: int
    logprob: float | None = None
    top: tuple[TopLogprob, ...] = ()
    finish: FinishReason | None = None
    error: str | None = None


class RowRound(msgspec.Struct, frozen=True, array_like=True):
    """What one row got from a round of speculation.

    `drafted` counts the nodes beyond the root, `accepted` the tokens that the round gave the row.
    """

    row: int
    drafted: int
    accepted: int


class GenerationRequest(msgspec.Struct, kw_only=True):
    """A batch for `handle_request`: rows, and per row the strings that end it."""

    rows: list[RowRequest]
    stop: list[tuple[str, ...]] = []


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
