import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.clients.http.conftest import openai_client
from tests.daemon.door.harness import Harness, until

HOME = "You are Hearth, the assistant of this home.\nDevices:\n- desk lamp (light, office): off"
ASKED: list[Any] = [
    {"role": "system", "content": HOME},
    {"role": "user", "content": "turn on the desk lamp"},
]
LAMP = '{"action":"turn_on","device":"desk lamp"}'
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "set_light",
        "description": "Switch a light.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"light": {"enum": ["desk", "hall"]}, "on": {"type": "boolean"}},
            "required": ["light", "on"],
        },
    },
}


PICTURE = "messages[0].content[0].image_url.url"


class Action(BaseModel):
    action: str
    device: str


def said(text: str) -> Any:
    return [{"role": "user", "content": text}]


def shown(url: str) -> Any:
    picture = {"type": "image_url", "image_url": {"url": url}}
    return [{"role": "user", "content": [picture, {"type": "text", "text": "What is this?"}]}]


def test_a_reply_whole_and_in_pieces(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="home", messages=ASKED)
    assert whole.choices[0].message.content == LAMP
    assert whole.choices[0].finish_reason == "stop"
    stream = client.chat.completions.create(
        model="home", messages=ASKED, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(one.choices[0].delta.content or "" for one in chunks[:-1]) == LAMP
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert [one.usage for one in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens > 0


def test_asyncio(home: str) -> None:
    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=f"{home}/v1", api_key="none") as client:
            stream = await client.chat.completions.create(
                model="home:latest", messages=ASKED, stream=True
            )
            return "".join([one.choices[0].delta.content or "" async for one in stream])

    assert asyncio.run(ask()) == LAMP


def test_replies_that_are_parsed(client: openai.OpenAI) -> None:
    found = client.chat.completions.parse(model="home", messages=ASKED, response_format=Action)
    assert found.choices[0].message.parsed == Action(action="turn_on", device="desk lamp")


def test_a_call_whole_and_in_pieces_and_its_result(client: openai.OpenAI) -> None:
    asked = said("Turn on the desk light.")
    options: Any = {"model": "home", "tools": [TOOL], "tool_choice": "required", "messages": asked}
    (choice,) = client.chat.completions.create(**options).choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "set_light"
    assert set(json.loads(call.function.arguments)) == {"light", "on"}
    with client.chat.completions.stream(**options) as stream:
        (same,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert json.loads(same.function.arguments) == json.loads(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    options |= {"messages": [*asked, choice.message, result], "tool_choice": "none"}
    after = client.chat.completions.create(**options, max_tokens=8).choices[0]
    assert not after.message.tool_calls


def test_a_named_tool_and_several_replies(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "set_light"}}
    found = client.chat.completions.create(
        model="home", messages=ASKED, tools=[TOOL], tool_choice=named, n=2, temperature=0.8, seed=1
    )
    names = [[one.function.name for one in c.message.tool_calls or []] for c in found.choices]  # type: ignore[union-attr] # one kind of call
    assert names == [["set_light"], ["set_light"]]


def test_log_probabilities(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(
        model="home", messages=ASKED, logprobs=True, top_logprobs=2
    )
    logprobs = found.choices[0].logprobs
    assert logprobs is not None
    tokens = logprobs.content or []
    assert "".join(one.token for one in tokens).startswith(LAMP)
    assert all(len(one.top_logprobs) == 2 for one in tokens)
    assert bytes(tokens[0].bytes or []).decode() == tokens[0].token


@pytest.mark.parametrize(
    ("options", "param", "code"),
    [
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "invalid_value"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", "invalid_value"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "unsupported_option"),
        ({"extra_body": {"fnord": 1}}, "fnord", "unsupported_option"),
        ({"modalities": ["audio"]}, "modalities", "unsupported_option"),
        ({"stream_options": {}}, "stream_options", "invalid_value"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "invalid_value"),
        ({"tools": [{**TOOL, "type": "custom"}]}, "tools[0].type", "unsupported_option"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name", "invalid_value"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "response_format.json_schema.schema",
            "grammar_invalid",
        ),
        ({"messages": []}, "messages", "invalid_value"),
        ({"extra_body": {"model": None}}, "model", "invalid_value"),
        ({"messages": shown("http://localhost/a.png")}, PICTURE, "invalid_value"),
        ({"messages": shown("data:image/png;base64,!")}, PICTURE, "invalid_value"),
        ({"messages": shown("data:image/png;base64,AAAA")}, PICTURE, "image_invalid"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages[0].role", "invalid_value"),
        ({"messages": said("\0" * 100_000)}, "messages", "prompt_too_long"),
    ],
)
def test_what_is_refused_is_named(
    client: openai.OpenAI, options: dict[str, Any], param: str, code: str
) -> None:
    asked: Any = {"model": "home", "messages": said("x"), **options}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**asked)
    assert (caught.value.param or "messages", caught.value.code) == (param, code)


def test_what_means_nothing_is_taken(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(
        model="home",
        messages=ASKED,
        user="u",
        store=True,
        metadata={"a": "b"},
        service_tier="auto",
        max_tokens=1,
    )
    assert found.choices[0].finish_reason == "length"


def test_a_model_that_there_is_not(client: openai.OpenAI) -> None:
    assert [one.id for one in client.models.list()] == ["home"]
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-5", messages=said("x"))
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_reasoning_stands_apart(played: openai.OpenAI) -> None:
    whole = played.chat.completions.create(model="toy", messages=said("calls"), tools=[TOOL])
    message: Any = whole.choices[0].message
    assert (message.content, message.reasoning_content) == ("ok", "hm")
    assert json.loads(message.tool_calls[0].function.arguments) == {"a": 1}


def test_a_failure_before_and_in_a_stream(played: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        played.chat.completions.create(model="toy", messages=said("fail"))
    assert (caught.value.status_code, caught.value.code) == (503, "executor_failed")
    assert caught.value.response.headers["retry-after"] == "1"
    stream = played.chat.completions.create(model="toy", messages=said("fail"), stream=True)
    with pytest.raises(openai.APIError) as broken:
        list(stream)
    assert broken.value.code == "executor_failed"


def test_who_leaves_cancels(door: str, actors: Harness) -> None:
    with openai_client(door) as client:
        stream = client.chat.completions.create(
            model="toy", messages=said("flood"), stream=True, max_tokens=5000
        )
        next(iter(stream))
        stream.close()
        until(lambda: len(actors.actors.cancelled) == 1)
    for number, streams in ((2, False), (3, True)):
        asked = {"model": "toy", "messages": said("hang"), "stream": streams}
        with httpx.Client(timeout=0.2) as quick, pytest.raises(httpx.ReadTimeout):
            quick.post(f"{door}/v1/chat/completions", json=asked)
        until(lambda number=number: len(actors.actors.cancelled) == number)  # type: ignore[misc] # a number


def test_what_the_daemon_is_asked(played: openai.OpenAI, actors: Harness) -> None:
    played.chat.completions.create(
        model="toy",
        messages=said("logprobs"),
        stop="END",
        logit_bias={"7": -1},
        presence_penalty=0.5,
        extra_body={"top_k": 3, "min_p": 0.1, "deadline_s": 5},
    )
    asked = actors.actors.prepared[-1]
    assert asked.options.stop == ("END",)
    assert asked.options.logit_bias == ((7, -1.0),)
    assert (asked.options.top_k, asked.options.min_p) == (3, 0.1)
    assert asked.options.presence_penalty == 0.5
