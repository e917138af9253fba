from collections.abc import Iterator
from typing import Any

import httpx
import ollama
import pytest

from tests.clients.http.test_chat import ASKED, LAMP, TOOL, Action, said


@pytest.fixture(scope="module")
def client(home: str) -> Iterator[ollama.Client]:
    with ollama.Client(home) as made:
        yield made


def test_a_reply_whole_and_in_pieces(client: ollama.Client) -> None:
    options = {"num_ctx": 8192, "num_predict": -1, "temperature": 0}
    whole = client.chat("home", ASKED, options=options, keep_alive=5, think=False)
    assert whole.message.content == LAMP
    assert (whole.done, whole.done_reason) == (True, "stop")
    pieces = list(client.chat("home", ASKED, stream=True))
    assert "".join(one.message.content or "" for one in pieces) == LAMP
    assert [one.done for one in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1].eval_count == whole.eval_count
    assert whole.total_duration


def test_a_form(client: ollama.Client) -> None:
    found = client.chat("home", ASKED, format=Action.model_json_schema())
    assert Action.model_validate_json(found.message.content or "").device == "desk lamp"
    found = client.chat("home", said("Hi"), format="json")
    assert (found.message.content or "").startswith("{")


def test_a_prompt(client: ollama.Client) -> None:
    system, user = (turn["content"] for turn in ASKED)
    assert client.generate("home", user, system=system).response == LAMP
    raw = client.generate("home", "The lamp", raw=True, stream=True, options={"num_predict": 3})
    assert list(raw)[-1].eval_count == 3
    assert client.generate("home").done_reason == "load"


@pytest.mark.parametrize("streams", [False, True])
def test_a_call_and_its_result(door: str, streams: bool) -> None:  # noqa: FBT001 - both ways
    asked: dict[str, Any] = {"model": "toy", "tools": [TOOL], "messages": said("calls")}
    with ollama.Client(door) as client:
        answers = list(client.chat(**asked, stream=True)) if streams else [client.chat(**asked)]
        (turn,) = [one.message for one in answers if one.message.tool_calls]
        (call,) = turn.tool_calls or []
        assert (call.function.name, call.function.arguments) == ("set_light", {"a": 1})
        assert "".join(one.message.thinking or "" for one in answers) == "hm"
        result = {"role": "tool", "tool_name": "set_light", "content": "logprobs"}
        asked["messages"] = [*said("calls"), turn, result]
        assert client.chat(**asked).message.content == "A"
        with pytest.raises(ollama.ResponseError, match=r"messages\[3\].tool_name"):
            client.chat(**{**asked, "messages": [*asked["messages"], result]})


def test_what_is_served(client: ollama.Client, home: str) -> None:
    assert [one.model for one in client.list().models] == ["home:latest"]
    shown = client.show("home")
    assert shown.capabilities == ["completion", "tools"]
    assert shown.modelinfo == {"general.architecture": "qwen3", "qwen3.context_length": 2042}
    assert httpx.get(f"{home}/api/version").json() == {"version": "0.3.0"}


@pytest.mark.parametrize(
    ("fields", "status", "field"),
    [
        ({"model": "llama3"}, 404, "model"),
        ({"options": {"num_predict": 0}}, 400, "options.num_predict"),
        ({"options": {"temperature": -1}}, 400, "options.temperature"),
        ({"options": {"mirostat": 1}}, 400, "options.mirostat"),
        ({"format": {"not": {}}}, 400, "format"),
        ({"fnord": 1}, 400, "fnord"),
        ({"messages": [{"role": "user", "images": [1]}]}, 400, "messages[0].images[0]"),
        ({"messages": [{"role": "user", "images": ["!"]}]}, 400, "messages[0].images[0]"),
    ],
)
def test_what_is_refused_is_named(
    home: str, fields: dict[str, Any], status: int, field: str
) -> None:
    answer = httpx.post(f"{home}/api/chat", json={"model": "home", "messages": ASKED, **fields})
    assert (answer.status_code, answer.json()["field"]) == (status, field)
    assert answer.json()["error"]
