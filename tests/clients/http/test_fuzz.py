from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from hearth_http import ollama
from hearth_http.errors import ApiError
from hearth_http.exchange import Asked
from hearth_http.fields import Fields, decode
from hearth_http.openai.chat import asked_of
from tests.clients.http.test_chat import ASKED, TOOL, shown
from tests.fuzz.mutations import mutated

GIF = "R0lGODlh"
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
WHOLE: Any = {
    "model": "home",
    "messages": [
        *ASKED,
        *shown(f"data:image/gif;base64,{GIF}"),
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "content": "5", "tool_call_id": "1"},
    ],
    "tools": [TOOL],
    "tool_choice": {"type": "function", "function": {"name": "set_light"}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}},
    "logit_bias": {"5": 1},
    "logprobs": True,
    "top_logprobs": 2,
}
OLLAMA: Any = {
    "model": "home:latest",
    "messages": [
        {"role": "user", "content": "x", "images": [GIF]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "5", "tool_name": "f"},
    ],
    "tools": [TOOL],
    "options": {"num_predict": 5, "num_ctx": 100, "stop": ["a"]},
    "format": {"type": "object"},
    "think": False,
    "keep_alive": "5m",
}


def refusal(take: Callable[[Fields, str], Asked], body: bytes) -> str:
    try:
        take(decode(body), "home")
    except ApiError as error:
        return error.code
    return ""


@pytest.mark.parametrize(("whole", "take"), [(WHOLE, asked_of), (OLLAMA, ollama.chat_of)])
def test_ten_thousand_bodies(whole: Any, take: Callable[[Fields, str], Asked]) -> None:
    bodies = mutated([whole], "http", 10_000, msgspec.json.encode)
    refused = [code for body in bodies if (code := refusal(take, body))]
    assert 1_000 < len(refused) < 9_000
    assert set(refused) <= {"bad_message", "invalid_value", "unsupported_option", "image_invalid"}
