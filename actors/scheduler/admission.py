from __future__ import annotations

from typing import NamedTuple

from hearth.actors.messages import ExecutorLimits
from hearth.actors.scheduler.request_state import RequestState
from hearth.actors.settings import PolicySettings
from hearth.runtime.errors import Code


class Refusal(NamedTuple):
    """The refusal of a request: a code, a message and the field or limit at fault.

    `ahead` is the number of requests that have to leave a full queue first, if it is known.
    """

    code: Code
    message: str
    field: str | None
    ahead: int = 0


EXPIRED = Refusal(
    "deadline_exceeded", "the request's deadline has passed: allow it more time", "deadline_s"
)
GUILTY = Refusal(
    "repeated_failure",
    "the executor or the encoder failed each time that this request was with it: change it, or try "
    "again in ten minutes",
    None,
)
ADAPTER_GONE = Refusal(
    "adapter_unknown", "the adapter was removed before the request had begun", "adapter"
)
TEXT_ONLY = Refusal(
    "unsupported_option", "this model reads text alone: leave the images out", "messages"
)


def within_share(own: int, more: int, waiting: int, limit: int, share: float) -> bool:
    """True if a client with `own` waiting may have `more`, while `waiting` of `limit` are taken.

    Dynamic threshold of Choudhury and Hahne (1998): a client's part may be a fixed multiple of the
    free units. A single client takes `share` of the limit, several clients take less each, and some
    units are always left for a new client. A client with nothing waiting is within its share.
    """
    if not own or share >= 1:
        return True
    return own + more <= share / (1 - share) * (limit - waiting - more)


def queue_refusal(
    entry: RequestState, requests: int, tokens: int, own_tokens: int, settings: PolicySettings
) -> Refusal | None:
    """Check a request with all of its replies against the limits of the queue; None if it fits.

    `requests` with `tokens` in their prompts wait, `own_tokens` of them are of its client. Several
    replies have a queue to themselves that is empty, whatever its limits.
    """
    replies = 1 + len(entry.request.siblings)
    over = requests + replies - settings.queue_requests
    if requests and over > 0:
        return Refusal(
            "queue_full",
            f"{requests} requests wait already, the limit is {settings.queue_requests}: "
            "try again later",
            "queue_requests",
            over,
        )
    more, limit = entry.prompt_tokens * replies, settings.queue_tokens
    if tokens and tokens + more > limit:
        # As many as have so many tokens, by the mean of those that wait.
        ahead = -(-(tokens + more - limit) * requests // tokens) if tokens else 1
        return Refusal(
            "queue_full",
            f"with this request {tokens + more} prompt tokens would wait, the limit is "
            f"{limit}: try again later",
            "queue_tokens",
            ahead,
        )
    if not within_share(own_tokens, more, tokens, limit, settings.client_queue_share):
        return Refusal(
            "too_many_requests",
            f"with this request {own_tokens + more} prompt tokens of this client would wait, more "
            "than its share: wait for a request to end",
            "client_queue_share",
        )
    return None


def size_refusal(
    entry: RequestState, settings: PolicySettings, limits: ExecutorLimits | None
) -> Refusal | None:
    """Check the length of a request against the capacity of a row; None if it fits.

    Without an executor `limits` is None, and only the limits of the queue count.
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
    # Without max_tokens a request takes what fits, and one token more at least.
    wanted = entry.request.options.max_tokens or len(entry.generated) + 1
    if limits is not None and length + wanted > limits.max_total_tokens:
        return Refusal(
            "capacity_exceeded",
            f"{length} prompt tokens and max_tokens {wanted} are more than the "
            f"{limits.max_total_tokens} tokens that fit: ask for at most "
            f"{limits.max_total_tokens - length}",
            "max_tokens",
        )
    return None
