"""Requests to the real daemon, and its replies."""

import base64
import json
import re
from typing import Any

import pytest

from clients.conformance.conftest import Drive
from clients.conformance.driving import Client, Driver
from hearth.daemon.own_daemon import OwnDaemon
from hearth_client import Client as Reference

TURNS = [{"role": "user", "content": "Turn on the desk lamp"}]
LAMP = {
    "name": "set_lamp",
    "description": "Switch the lamp on or off.",
    "parameters": {
        "type": "object",
        "properties": {"on": {"type": "boolean"}},
        "required": ["on"],
        "additionalProperties": False,
    },
}


@pytest.fixture
def driver(drive: Drive, daemon: OwnDaemon) -> Driver:
    """A driver that is connected to the daemon."""
    started = drive(daemon.socket)
    started.connect()
    return started


def test_the_welcome_is_told(drive: Drive, daemon: OwnDaemon) -> None:
    driver = drive(daemon.socket)
    told = driver.connect(lease_s=40, name="conformance")
    with Reference(daemon.socket) as reference:
        welcome = reference.connect()
    assert told["proto"] == 1
    assert told["server"] == welcome.server
    assert told["epoch"] == welcome.epoch
    assert told["model"] == "home"
    assert set(told["features"]) == set(welcome.features)
    assert told["limits"]["lease_s"] == 40
    assert told["limits"]["frame_bytes"] == welcome.limits.frame_bytes
    assert told["limits"]["total_tokens"] == welcome.limits.total_tokens
    assert driver.close() == [{"event": "closed"}]


def test_the_end_of_input_closes_the_client(driver: Driver) -> None:
    assert driver.end_input() == [{"event": "closed"}]


def test_the_example_prints_the_reply(client: Client, daemon: OwnDaemon) -> None:
    with Reference(daemon.socket) as reference:
        text = reference.generate(messages=TURNS, max_tokens=64).text()
    ran = client.run("example", HEARTH_SOCKET=str(daemon.socket))
    assert (ran.returncode, ran.stdout) == (0, text + "\n"), ran.stderr


def test_deltas_joined_are_the_reply(driver: Driver, daemon: OwnDaemon) -> None:
    answered = driver.ask("a", messages=TURNS, max_tokens=64)
    with Reference(daemon.socket) as reference:
        generation = reference.generate(messages=TURNS, max_tokens=64)
        text = generation.text()
        assert generation.done is not None
    assert answered.events[0]["event"] == "accepted"
    usage = answered.end["usage"]
    assert answered.events[0]["prompt_tokens"] == usage["prompt_tokens"]
    assert answered.end["reason"] == "stop"
    assert answered.joined() == text
    assert answered.tokens() == generation.tokens
    assert usage["completion_tokens"] == len(answered.tokens())
    assert usage["prompt_tokens"] == generation.done.usage.prompt_tokens


def test_options_of_sampling_are_honoured(driver: Driver, daemon: OwnDaemon) -> None:
    options: dict[str, Any] = {
        "max_tokens": 24,
        "temperature": 1.9,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "presence_penalty": -0.5,
        "frequency_penalty": 1.5,
        "logit_bias": [[5, -100.0], [7, 1.5]],
        "seed": 9223372036854775807,
        "ignore_eos": True,
        "priority": 3,
        "deadline_s": 60.0,
        "timestamps": True,
        "speculation": False,
        "cache": "bypass",
        "cache_salt": "of this one",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "adapter": "",
    }
    answered = driver.ask("a", prompt="The lamp", **options)
    with Reference(daemon.socket) as reference:
        expected = reference.generate("The lamp", **options).text()
    assert answered.end["reason"] == "length"
    assert len(answered.tokens()) == 24
    assert answered.joined() == expected
    assert all(isinstance(one["ended"], float) for one in answered.deltas if one["tokens"])
    assert not answered.end.get("speculation")
    other = driver.ask("b", prompt="The lamp", **{**options, "seed": 1})
    assert other.joined() != expected


def test_a_stop_string_ends_the_reply_and_is_named(driver: Driver) -> None:
    whole = driver.ask("a", messages=TURNS).joined()
    assert ":" in whole
    stopped = driver.ask("b", messages=TURNS, stop=["}", ":"])
    assert stopped.joined() == whole[: whole.index(":")]
    assert (stopped.end["reason"], stopped.end["stop"]) == ("stop", ":")


def test_speculation_is_told(driver: Driver) -> None:
    end = driver.ask("a", prompt="a", max_tokens=64, ignore_eos=True, speculation=True).end
    assert set(end["speculation"]) == {"rounds", "drafted", "accepted", "accept_length"}


def test_a_tool_is_called_and_its_result_answered(driver: Driver) -> None:
    asked: dict[str, Any] = {
        "tools": [LAMP],
        "tool_choice": {"name": "set_lamp"},
        "parallel_tool_calls": False,
    }
    answered = driver.ask("a", messages=TURNS, max_tokens=128, **asked)
    assert answered.end["reason"] == "tool_calls"
    assert answered.joined() == ""
    (call,) = answered.tool_calls()
    assert call["name"] == "set_lamp"
    assert set(call["arguments"]) == {"on"}
    turns = [
        *TURNS,
        {"role": "assistant", "tool_calls": [call], "reasoning": "A lamp."},
        {"role": "tool", "tool_call_id": call["id"], "name": "set_lamp", "content": '{"on":true}'},
    ]
    after = driver.ask("b", messages=turns, tools=[LAMP], tool_choice="none", max_tokens=32)
    assert after.end["event"] == "done"
    assert not after.tool_calls()


def test_without_features_calls_stay_in_the_text(drive: Drive, daemon: OwnDaemon) -> None:
    driver = drive(daemon.socket)
    driver.connect(features=[])
    answered = driver.ask(
        "a", messages=TURNS, tools=[LAMP], tool_choice="required", max_tokens=128, logprobs=0
    )
    assert answered.end["reason"] == "stop"
    assert "set_lamp" in answered.joined()
    assert not answered.tool_calls()
    assert not any(one.get("token_bytes") for one in answered.logprobs())


FORMS: list[dict[str, Any]] = [
    {"type": "json_object"},
    {
        "type": "json_schema",
        "schema": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]},
    },
    {"type": "regex", "regex": "(on|off) [0-9]{2}"},
    {"type": "lark", "grammar": 'start: "on" | "off"'},
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form["type"])
def test_the_answer_has_the_form(driver: Driver, form: dict[str, Any]) -> None:
    answered = driver.ask("a", messages=TURNS, response_format=form, max_tokens=128)
    assert answered.end["event"] == "done", answered.end
    text = answered.joined()
    if form["type"] == "json_schema":
        assert set(json.loads(text)) == {"on"}
    elif form["type"] == "json_object":
        assert text.startswith("{")
    elif form["type"] == "regex":
        assert re.fullmatch(str(form["regex"]), text)
    else:
        assert text in {"on", "off"}


def test_several_replies_are_told_apart(driver: Driver) -> None:
    asked: dict[str, Any] = {"max_tokens": 16, "temperature": 1.5, "ignore_eos": True}
    asked["speculation"] = False
    answered = driver.ask("a", prompt="The", n=3, seed=5, **asked)
    ends = answered.end["choices"]
    assert [one["completion_tokens"] for one in ends] == [16, 16, 16]
    assert [len(answered.tokens(choice)) for choice in range(3)] == [16, 16, 16]
    assert answered.end["usage"]["completion_tokens"] == 48
    alone = driver.ask("b", prompt="The", seed=7, **asked)
    assert answered.joined(choice=2) == alone.joined()
    assert len({answered.joined(choice=choice) for choice in range(3)}) == 3


def test_log_probabilities_have_their_bytes(driver: Driver) -> None:
    answered = driver.ask("a", messages=TURNS, logprobs=2, max_tokens=32)
    told = answered.logprobs()
    assert len(told) == len(answered.tokens())
    for one, token in zip(told, answered.tokens(), strict=True):
        assert one["logprob"] <= 0
        assert [len(pair) for pair in one["top"]] == [2, 2]
        assert len(one["top_bytes"]) == 2
        assert one["top"][0] == [token, pytest.approx(one["logprob"])]
        assert one["top_bytes"][0] == one.get("token_bytes", "")
    joined = b"".join(base64.b64decode(one.get("token_bytes", "")) for one in told)
    assert joined.startswith(answered.joined().encode())


def test_characters_of_several_bytes_come_whole(driver: Driver) -> None:
    text = "Schön 🙂 " + "日本"
    form = {"type": "regex", "regex": text}
    answered = driver.ask("a", messages=TURNS, response_format=form, max_tokens=64)
    assert answered.joined() == text


def test_tokens_and_text(driver: Driver, daemon: OwnDaemon) -> None:
    text = "Turn on the lämp 🙂"
    driver.do("tokenize", "a", request={"text": text})
    tokens = driver.answered("a").end["tokens"]
    driver.do("detokenize", "b", request={"tokens": tokens})
    assert driver.answered("b").end == {"event": "text", "as": "b", "text": text}
    driver.do("tokenize", "c", request={"messages": TURNS, "tools": [LAMP], "tool_choice": "none"})
    with Reference(daemon.socket) as reference:
        assert tokens == reference.tokenize(text)
        assert driver.answered("c").end["tokens"] == reference.tokenize(
            messages=TURNS, tools=[LAMP], tool_choice="none"
        )
    driver.do("tokenize", "d", request={"text": ""})
    assert driver.answered("d").end["tokens"] == []


def test_status(driver: Driver) -> None:
    driver.ask("a", messages=TURNS)
    driver.do("status", "b")
    told = driver.answered("b").end
    assert told["event"] == "status_report"
    assert (told["state"], told["model"]) == ("ready", "home")
    assert told["places"] >= 1
    assert told["totals"]["requests"] >= 1
    assert told["engine"]["backend"] == "onnxruntime"
    assert told["executor"]["generation"]["steps"] >= 1


def test_many_replies_at_once_are_each_whole(driver: Driver) -> None:
    names = [f"r{index}" for index in range(12)]
    for name in names:
        driver.generate(name, messages=TURNS, max_tokens=32)
    replies = {driver.answered(name).joined() for name in names}
    assert len(replies) == 1
