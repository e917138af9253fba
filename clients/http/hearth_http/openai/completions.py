"""Completions of OpenAI's API, its models, and tokens as vLLM's server counts them."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.responses import JSONResponse, Response

from hearth_client import TokenLogprob
from hearth_http.errors import invalid, unsupported
from hearth_http.exchange import Asked, Call, Running, Stream, written
from hearth_http.fields import Fields
from hearth_http.openai import conversation
from hearth_http.openai.chat import counts_at_end
from hearth_http.openai.options import (
    DONE,
    alternatives,
    event,
    failed,
    model,
    sampling,
    token_text,
    usage,
)

_MAX_TOKENS = 16
"""Tokens of a reply where the request does not say, by the API."""


async def completions(call: Call) -> Response:
    """`POST /v1/completions`."""
    served = await call.served()
    fields = call.fields
    streams = fields.flag("stream")
    counts = counts_at_end(fields, streams=streams)
    options = {"max_tokens": _MAX_TOKENS, **sampling(fields), **model(fields, served)}
    options |= fields.some("max_tokens", "logprobs")
    fields.only("echo", False)
    fields.only("best_of", options.get("n", 1))
    fields.only("suffix", "")
    prompt = _prompt(fields)
    fields.end()
    running = await call.begin(Asked(options, prompt=prompt, names=[(r"^adapter$", "model")]))
    head = {"id": f"cmpl-{running.id}", "object": "text_completion", "created": running.created}
    head["model"] = options.get("adapter", served)
    if streams:
        return Stream(running, _events(running, head, counts), failed, "text/event-stream")
    found = await call.unless_left(written(running, options.get("n", 1)))
    choices = [
        _choice(index, "".join(reply.text), reply.logprobs, running.reason(index))
        for index, reply in enumerate(found)
    ]
    return JSONResponse({**head, "choices": choices, "usage": usage(running.done)})


def _prompt(fields: Fields) -> str:
    prompt = fields.take("prompt")
    if isinstance(prompt, list):
        if len(prompt) != 1 or not isinstance(prompt[0], str):
            raise unsupported("prompt", "may be one text alone")
        prompt = prompt[0]
    if not isinstance(prompt, str):
        raise invalid("prompt", "must be text")
    return prompt


async def _events(
    running: Running,
    head: dict[str, Any],
    counts: bool,  # noqa: FBT001 - the request's own word
) -> AsyncGenerator[bytes, None]:
    async with aclosing(running.deltas()) as deltas:
        async for delta in deltas:
            if delta.text or delta.logprobs:
                choice = _choice(delta.choice, delta.text, delta.logprobs, None)
                yield event({**head, "choices": [choice]})
    done = running.done
    for index in range(max(1, len(done.choices))):
        yield event({**head, "choices": [_choice(index, "", [], running.reason(index))]})
    if counts:
        yield event({**head, "choices": [], "usage": usage(done)})
    yield DONE


def _choice(
    index: int, text: str, tokens: list[TokenLogprob], reason: str | None
) -> dict[str, Any]:
    found = {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
    if tokens:
        found["logprobs"] = {
            "tokens": [token_text(one.token_bytes) for one in tokens],
            "token_logprobs": [one.logprob for one in tokens],
            "top_logprobs": [{token_text(d): p for d, p in alternatives(one)} for one in tokens],
        }
    return found


async def models(call: Call) -> Response:
    """`GET /v1/models`: the model, and each adapter as one more."""
    report = await call.unless_left(call.client.status())
    names = [report.model, *report.adapters]
    own = {"object": "model", "created": 0, "owned_by": "hearth"}
    return JSONResponse({"object": "list", "data": [{"id": name, **own} for name in names]})


async def tokenize(call: Call) -> Response:
    """`POST /tokenize`: ids of `prompt`, or of `messages`."""
    welcome = await call.unless_left(call.client.connect())
    fields = call.fields
    model(fields, welcome.model)
    prompt = fields.text("prompt")
    options: dict[str, Any] = {}
    turns = None
    if prompt is None:
        options = conversation.tools(fields)
        turns = conversation.turns(fields)
    fields.only("add_special_tokens", False)
    fields.only("return_token_strs", False)
    fields.end()
    asked = Asked(options, prompt, turns, conversation.NAMES)
    asking = call.client.tokenize(asked.prompt, messages=asked.turns, **asked.options)
    tokens = await call.unless_left(asking, asked)
    most = welcome.limits.total_tokens
    return JSONResponse({"count": len(tokens), "max_model_len": most, "tokens": tokens})
