"""Ollama's API: chat and generate, and what is served."""

from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from datetime import datetime, timezone
from typing import Any

import msgspec
from starlette.responses import JSONResponse, Response

from hearth_client import Delta, Message, StatusReport, ToolCall
from hearth_http.errors import ApiError, invalid
from hearth_http.exchange import Asked, Call, Running, Stream, Written, written
from hearth_http.fields import Fields
from hearth_http.openai import conversation
from hearth_http.openai.options import model

IGNORED = (
    *("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep"),
    *("low_vram", "use_mmap", "use_mlock", "numa"),
)
"""Options of how a model is loaded, which is its owner's matter here."""
_SAME = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "stop"),
    *("presence_penalty", "frequency_penalty"),
)
_RENAMED = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
_NAMES = (
    (r"^(messages\[\d+\])\.reasoning$", r"\1.thinking"),
    (r"^response_format(\.schema)?", "format"),
    *conversation.NAMES,
    *((f"^{name}", f"options.{own}") for own, name in _RENAMED.items()),
    *((f"^({name})", r"options.\1") for name in _SAME),
)
Piece = Callable[[str, str, list[dict[str, Any]]], dict[str, Any]]
"""Form of text, reasoning and calls in an answer."""


async def chat(call: Call) -> Response:
    """`POST /api/chat`."""
    streams = call.fields.flag("stream", default=True)
    return await _answer(call, chat_of(call.fields, await call.served()), _message, streams=streams)


async def generate(call: Call) -> Response:
    """`POST /api/generate`: a prompt as a turn of its own, or with `raw` as it is."""
    streams = call.fields.flag("stream", default=True)
    asked = _prompt_of(call.fields, await call.served())
    return await _answer(call, asked, _response, streams=streams)


def chat_of(fields: Fields, served: str) -> Asked:
    """The generation that a conversation asks for; without turns there is nothing to do."""
    turns = _turns(fields)
    return Asked(conversation.tools(fields) | _options(fields, served), turns=turns, names=_NAMES)


def _prompt_of(fields: Fields, served: str) -> Asked:
    prompt, raw = fields.text("prompt") or "", fields.flag("raw")
    user = {"role": "user", "content": prompt, **fields.some("images")}
    system = fields.text("system")
    fields.only("suffix", "")
    fields.only("template", "")
    fields.only("context", [])
    options = _options(fields, served)
    if raw and (system or "images" in user):
        raise invalid("raw", "goes with a prompt alone, without system and images")
    if raw and prompt:
        return Asked(options, prompt=prompt, names=_NAMES)
    turns = [_turn(Fields(user), {}, 0)] if prompt else []
    if system and turns:
        turns.insert(0, Message(role="system", content=system))
    return Asked(options, turns=turns, names=_NAMES)


def _options(fields: Fields, served: str) -> dict[str, Any]:
    """Options that chat and generate have in common, and the end of the fields."""
    fields.some("keep_alive")
    found = model(fields, served) | _sampling(fields) | _thinking(fields) | _format(fields)
    fields.end()
    return found


async def _answer(call: Call, asked: Asked, piece: Piece, *, streams: bool) -> Response:
    head = {"model": asked.options.get("adapter") or await call.served()}
    if not asked.turns and not asked.prompt:
        # Nothing but to have the model loaded, as it is.
        return JSONResponse({**_dated(head), **piece("", "", []), **_end("load")})
    running = await call.begin(asked)
    if streams:
        events = _events(running, head, piece)
        return Stream(running, events, _failed, "application/x-ndjson")
    (reply,) = await call.unless_left(written(running, 1))
    told = piece("".join(reply.text), "".join(reply.reasoning), _calls(reply))
    return JSONResponse({**_dated(head), **told, **_done(running)})


def _turns(fields: Fields) -> list[conversation.Turn]:
    open_calls: dict[str, deque[str]] = {}
    items = fields.items("messages")
    return [_turn(Fields(one, path), open_calls, at) for at, (path, one) in enumerate(items)]


def _turn(turn: Fields, open_calls: dict[str, deque[str]], place: int) -> conversation.Turn:
    """A turn; `open_calls` are ids of calls without a result, by name, which this API has not."""
    text, role = turn.text("content") or "", turn.needed("role")
    pictures = [conversation.image_of(one, at) for at, one in turn.items("images")]
    calls = []
    for at, (path, value) in enumerate(turn.items("tool_calls")):
        calls.append(_call(Fields(value, path), f"call_{place}_{at}"))
        open_calls.setdefault(calls[-1].name, deque()).append(calls[-1].id)
    found: dict[str, Any] = {
        "role": role,
        "content": [*pictures, *([text] if text else [])] if pictures else text,
        "reasoning": turn.text("thinking") or "",
        "tool_calls": calls,
        "name": turn.text("tool_name"),
    }
    turn.end()
    if calls and not found["content"]:
        found["content"] = None
    if role == "tool":
        # A result without a name is that of the first call that has none.
        waiting = [ids for name, ids in open_calls.items() if ids and found["name"] in {None, name}]
        if not waiting:
            raise invalid(turn.at("tool_name"), "is no tool of a call that has no result yet")
        found["tool_call_id"] = waiting[0].popleft()
    return found if pictures else Message(**found)


def _call(call: Fields, call_id: str) -> ToolCall:
    call.some("id", "type")
    inner = call.part("function")
    inner.some("index")
    found = ToolCall(id=call_id, name=inner.needed("name"), arguments=inner.take("arguments") or {})
    inner.end()
    call.end()
    return found


def _sampling(fields: Fields) -> dict[str, Any]:
    options = fields.inner("options")
    if options is None:
        return {}
    options.some(*IGNORED)
    found = options.some(*_SAME)
    given = options.some(*_RENAMED)
    found |= {_RENAMED[name]: value for name, value in given.items()}
    options.end()
    # -1 is as many as there is room for.
    if found.get("max_tokens") in [-1, -2]:
        del found["max_tokens"]
    return found


def _thinking(fields: Fields) -> dict[str, Any]:
    think = fields.take("think")
    if isinstance(think, str):
        return {"template": {"reasoning_effort": think}}
    return {"reasoning_budget": 0} if think is False else {}


def _format(fields: Fields) -> dict[str, Any]:
    form = fields.take("format")
    if form in (None, ""):
        return {}
    if form == "json":
        return {"response_format": {"type": "json_object"}}
    return {"response_format": {"type": "json_schema", "schema": form}}


def _message(text: str, reasoning: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"role": "assistant", "content": text}
    found |= {"thinking": reasoning} if reasoning else {}
    return {"message": found | ({"tool_calls": calls} if calls else {})}


def _response(text: str, reasoning: str, _calls: list[dict[str, Any]]) -> dict[str, Any]:
    return {"response": text, **({"thinking": reasoning} if reasoning else {})}


async def _events(
    running: Running, head: dict[str, Any], piece: Piece
) -> AsyncGenerator[bytes, None]:
    reply = Written()
    async with aclosing(running.deltas()) as deltas:
        async for delta in deltas:
            # A call is told once it is whole.
            reply.add(Delta(id="", seq=0, text="", tool_calls=delta.tool_calls))
            if delta.text or delta.reasoning:
                told = piece(delta.text, delta.reasoning, [])
                yield _line({**_dated(head), **told, "done": False})
    if calls := _calls(reply):
        yield _line({**_dated(head), **piece("", "", calls), "done": False})
    yield _line({**_dated(head), **piece("", "", []), **_done(running)})


def _calls(reply: Written) -> list[dict[str, Any]]:
    found = [{"name": name, "arguments": given} for _, name, given in reply.whole_calls()]
    return [{"function": one} for one in found]


def _done(running: Running) -> dict[str, Any]:
    used, reason = running.done.usage, running.done.reason
    nanoseconds = [int(ms * 1e6) for ms in (used.queue_ms, used.prefill_ms, used.decode_ms)]
    return {
        # A call is a stop as any other here.
        **_end("stop" if reason == "tool_calls" else reason),
        "total_duration": sum(nanoseconds),
        "load_duration": nanoseconds[0],
        "prompt_eval_count": used.prompt_tokens,
        "prompt_eval_duration": nanoseconds[1],
        "eval_count": used.completion_tokens,
        "eval_duration": nanoseconds[2],
    }


def _end(reason: str) -> dict[str, Any]:
    return {"done": True, "done_reason": reason}


def _dated(head: dict[str, Any]) -> dict[str, Any]:
    return {**head, "created_at": datetime.now(timezone.utc).isoformat()}


def _line(value: Any) -> bytes:
    return msgspec.json.encode(value) + b"\n"


def _failed(error: ApiError) -> bytes:
    return _line(error.ollama)


async def tags(call: Call) -> Response:
    """`GET /api/tags`: the model and its adapters."""
    report = await call.unless_left(call.client.status())
    own = {"modified_at": "1970-01-01T00:00:00Z", "size": 0, "digest": ""}
    return JSONResponse(
        {
            "models": [
                {"name": f"{name}:latest", "model": f"{name}:latest", **own, **_details(report)}
                for name in (report.model, *report.adapters)
            ]
        }
    )


async def show(call: Call) -> Response:
    """`POST /api/show`: what a model can."""
    welcome = await call.unless_left(call.client.connect())
    report = await call.unless_left(call.client.status())
    call.fields.some("verbose")
    named = model(call.fields, welcome.model).get("adapter")
    call.fields.end()
    if named is not None and named not in report.adapters:
        raise ApiError(404, "model_not_found", f"model '{named}' not found", "model")
    family = str(report.engine.get("architecture", ""))
    length = welcome.limits.total_tokens
    info = {"general.architecture": family, f"{family}.context_length": length}
    told = {"modelfile": "", "parameters": "", "template": "", **_details(report)}
    known = {"tools": "tools", "images": "vision"}
    can = ["completion", *(name for one, name in known.items() if one in welcome.features)]
    return JSONResponse({**told, "model_info": info, "capabilities": can})


def _details(report: StatusReport) -> dict[str, Any]:
    family = str(report.engine.get("architecture", ""))
    weights = str(report.engine.get("quantization", ""))
    own = {"parent_model": "", "format": "hearth", "parameter_size": ""}
    families = {"family": family, "families": [family]}
    return {"details": {**own, **families, "quantization_level": weights}}


async def version(call: Call) -> Response:
    """`GET /api/version`: that of the daemon."""
    report = await call.unless_left(call.client.status())
    return JSONResponse({"version": report.server.rpartition(" ")[2]})
