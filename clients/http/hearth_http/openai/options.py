"""Options and counts that chat, completions and responses of OpenAI's API have in common."""

from typing import Any

import msgspec

from hearth_client import Done
from hearth_client.protocol import TokenLogprob
from hearth_http.errors import ApiError, invalid
from hearth_http.fields import Fields

IGNORED = (
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "store",
    "user",
)
"""Fields without an effect on the reply."""
_SAME = (
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "n",
    # What vLLM's server has beyond the API, and Hearth's own.
    "top_k",
    "min_p",
    "repetition_penalty",
    "ignore_eos",
    "priority",
    "deadline_s",
    "cache",
)
"""Options that the API calls as Hearth does. The daemon checks their values."""


def sampling(fields: Fields) -> dict[str, Any]:
    """Options of sampling, and of which model."""
    fields.some(*IGNORED)
    fields.only("service_tier", "auto", "default")
    found = fields.some(*_SAME)
    bias = fields.take("logit_bias")
    if isinstance(bias, dict) and all(name.isascii() and name.isdigit() for name in bias):
        found["logit_bias"] = [(int(name), value) for name, value in bias.items()]
    elif bias is not None:
        raise invalid("logit_bias", "must be an object with ids of tokens as its names")
    return found


def model(fields: Fields, served: str) -> dict[str, Any]:
    """The adapter that `model` names; none for the served model itself."""
    # Ollama's names end with a tag.
    name = fields.needed("model").removesuffix(":latest")
    return {} if name == served else {"adapter": name}


def usage(done: Done) -> dict[str, Any]:
    """Counts of tokens of a request."""
    counted = done.usage
    return {
        "prompt_tokens": counted.prompt_tokens,
        "completion_tokens": counted.completion_tokens,
        "total_tokens": counted.prompt_tokens + counted.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": counted.cached_tokens},
    }


def token_text(data: bytes) -> str:
    """Text of a token's bytes, which need not be whole characters."""
    return data.decode("utf-8", "replace")


def alternatives(one: TokenLogprob) -> list[tuple[bytes, float]]:
    """Bytes and log probability of each alternative of a token."""
    return [(data, logprob) for data, (_, logprob) in zip(one.top_bytes, one.top, strict=False)]


def event(value: Any, name: str = "") -> bytes:
    """An event of a stream."""
    head = f"event: {name}\n".encode() if name else b""
    return b"%bdata: %b\n\n" % (head, msgspec.json.encode(value))


DONE = b"data: [DONE]\n\n"


def failed(error: ApiError) -> bytes:
    """The last event of a stream that fails."""
    return event(error.openai)
