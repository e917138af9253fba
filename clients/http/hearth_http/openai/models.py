"""Models that are served, by OpenAI's API, and tokens as vLLM's server counts them."""

from typing import Any

from starlette.responses import JSONResponse, Response

from hearth_http.exchange import Asked, Call
from hearth_http.openai import conversation
from hearth_http.openai.options import model


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
