"""Chat completions of OpenAI's API."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.responses import JSONResponse, Response

from hearth_client import Delta, TokenLogprob
from hearth_http.errors import invalid
from hearth_http.exchange import Asked, Call, Running, Stream, Written, written
from hearth_http.fields import Fields
from hearth_http.openai import conversation
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

_BEGIN = {"role": "assistant", "content": ""}


async def chat(call: Call) -> Response:
    """`POST /v1/chat/completions`."""
    served = await call.served()
    fields = call.fields
    streams = fields.flag("stream")
    counts = counts_at_end(fields, streams=streams)
    asked = asked_of(fields, served)
    fields.end()
    running = await call.begin(asked)
    name = asked.options.get("adapter", served)
    if streams:
        return Stream(running, _events(running, name, counts), failed, "text/event-stream")
    replies = asked.options.get("n", 1)
    found = await call.unless_left(written(running, replies))
    choices = [
        {
            "index": index,
            "message": _message(reply),
            "logprobs": _logprobs(reply.logprobs),
            "finish_reason": running.reason(index),
        }
        for index, reply in enumerate(found)
    ]
    head = _head(running, name, "chat.completion")
    return JSONResponse({**head, "choices": choices, "usage": usage(running.done)})


def counts_at_end(fields: Fields, *, streams: bool) -> bool:
    """True if a stream is to end with its usage."""
    options = fields.inner("stream_options")
    if options is None:
        return False
    if not streams:
        raise invalid(fields.at("stream_options"), "goes with stream alone")
    counts = options.flag("include_usage")
    options.only("include_obfuscation", False)
    options.end()
    return counts


def asked_of(fields: Fields, served: str) -> Asked:
    """The generation that the fields ask for."""
    options = sampling(fields) | model(fields, served)
    options |= conversation.tools(fields) | conversation.response_format(fields)
    options |= fields.some("reasoning_budget")
    names = [*conversation.NAMES]
    both = fields.some("max_tokens", "max_completion_tokens")
    for name, value in both.items():
        options["max_tokens"] = value
        names.append((r"^max_tokens", name))
    if len(set(map(repr, both.values()))) > 1:
        raise invalid("max_completion_tokens", "differs from max_tokens: give one of them")
    fields.only("modalities", ["text"])
    fields.only("verbosity", "medium")
    variables = fields.take("chat_template_kwargs") or {}
    if not isinstance(variables, dict):
        raise invalid("chat_template_kwargs", "must be an object")
    effort = fields.text("reasoning_effort")
    if effort == "none":
        options["reasoning_budget"] = 0
    elif effort is not None:
        names.insert(0, (r"^template\.reasoning_effort", "reasoning_effort"))
        variables = {**variables, "reasoning_effort": effort}
    if variables:
        options["template"] = variables
    top = fields.some("top_logprobs")
    if fields.flag("logprobs"):
        options["logprobs"] = top.get("top_logprobs", 0)
        names.append((r"^logprobs", "top_logprobs"))
    elif top:
        raise invalid("top_logprobs", "goes with logprobs: true")
    return Asked(options, turns=conversation.turns(fields), names=names)


def _head(running: Running, name: str, kind: str) -> dict[str, Any]:
    own = {"id": f"chatcmpl-{running.id}", "object": kind, "created": running.created}
    return {**own, "model": name}


def _message(reply: Written) -> dict[str, Any]:
    calls = [
        _call(call_id, name, msgspec.json.encode(given).decode())
        for call_id, name, given in reply.whole_calls()
    ]
    text = "".join(reply.text)
    found: dict[str, Any] = {"role": "assistant", "content": None if calls and not text else text}
    found |= {"refusal": None, "annotations": []}
    reasoning = "".join(reply.reasoning)
    if reasoning:
        found["reasoning_content"] = reasoning
    if calls:
        found["tool_calls"] = calls
    return found


def _logprobs(tokens: list[TokenLogprob]) -> dict[str, Any] | None:
    if not tokens:
        return None
    content = [
        {
            **_token(one.token_bytes, one.logprob),
            "top_logprobs": [_token(data, logprob) for data, logprob in alternatives(one)],
        }
        for one in tokens
    ]
    return {"content": content, "refusal": None}


def _token(data: bytes, logprob: float) -> dict[str, Any]:
    return {"token": token_text(data), "bytes": list(data), "logprob": logprob}


async def _events(running: Running, name: str, counts: bool) -> AsyncGenerator[bytes, None]:  # noqa: FBT001 - the request's own word
    head = _head(running, name, "chat.completion.chunk")
    if counts:
        head["usage"] = None
    begun: set[int] = set()

    def chunk(index: int, change: dict[str, Any], **more: Any) -> bytes:
        whole = {"index": index, "delta": change, "logprobs": None, "finish_reason": None, **more}
        return event({**head, "choices": [whole]})

    async with aclosing(running.deltas()) as deltas:
        async for delta in deltas:
            change, logprobs = _change(delta), _logprobs(delta.logprobs)
            if delta.choice not in begun:
                begun.add(delta.choice)
                change = {**_BEGIN, **change}
            if change or logprobs:
                yield chunk(delta.choice, change, logprobs=logprobs)
    done = running.done
    for index in range(max(1, len(done.choices))):
        yield chunk(index, {} if index in begun else _BEGIN, finish_reason=running.reason(index))
    if counts:
        yield event({**head, "choices": [], "usage": usage(done)})
    yield DONE


def _change(delta: Delta) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if delta.text:
        found["content"] = delta.text
    if delta.reasoning:
        found["reasoning_content"] = delta.reasoning
    if delta.tool_calls:
        found["tool_calls"] = [
            {"index": one.index, **_call(one.id, one.name, one.arguments)}
            for one in delta.tool_calls
        ]
    return found


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call, or its next piece, which has neither id nor name."""
    if not call_id:
        return {"function": {"arguments": arguments}}
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
