import json
from contextlib import suppress
from queue import Empty
from typing import Any

import pytest

from hearth_msgs.msg import Tool, Turn

SCHEMA = {
    "type": "object",
    "properties": {"room": {"enum": ["hall", "attic"]}, "on": {"type": "boolean"}},
    "required": ["room", "on"],
}
BEGIN = "Once there"
BATTERY = {"name": "get_battery", "description": "Get the robot's battery level."}


def goal(ros: Any, text: str, **fields: Any) -> Any:
    return ros.goal_type(messages=[Turn(role="user", content=text)], **fields)


def heard(goal: Any) -> list[Any]:
    """All feedback up to now."""
    return [goal.feedback.get_nowait() for _ in range(goal.feedback.qsize())]


def test_a_reply_streams(ros: Any, node: str) -> None:
    sent = ros.send(node, goal(ros, "Tell me a story"))
    first = sent.feedback.get(timeout=30)
    state, result = sent.end()
    assert (state, result.reason, result.rounds, result.error_code) == ("succeeded", "stop", 1, "")
    assert result.text.count(".") > 3
    assert result.request
    # Feedback and result come on topics of their own, and ROS keeps no piece for a goal that ended.
    pieces = [first]
    with suppress(Empty):
        while "".join(one.text for one in pieces) != result.text:
            pieces.append(sent.feedback.get(timeout=3))
    numbers = [one.seq for one in pieces]
    assert numbers == sorted(set(numbers))
    assert all(one.text in result.text for one in pieces)
    whole = (
        numbers == list(range(len(pieces))) and "".join(one.text for one in pieces) == result.text
    )
    assert len(pieces) > 3
    # The token that ends a reply has no text, and comes in a piece of its own or in none.
    left = result.completion_tokens - sum(len(one.tokens) for one in pieces)
    assert left in {0, 1} if whole else left > 0


def test_a_reply_is_cancelled(ros: Any, node: str) -> None:
    sent = ros.send(node, goal(ros, "Tell me a story", options='{"ignore_eos": true}'))
    sent.feedback.get(timeout=30)
    sent.cancel()
    state, result = sent.end()
    assert (state, result.reason) == ("cancelled", "cancelled")
    assert result.text[:9] in {BEGIN[:n] for n in range(1, 10)}


def test_many_goals_run_at_once(ros: Any, node: str) -> None:
    texts = ["Tell me a story", "How do you work?", "Hello"]
    sent = [ros.send(node, goal(ros, text)) for text in texts]
    assert [one.end()[0] for one in sent] == ["succeeded"] * 3


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"adapter": "none"}, "adapter_unknown", "adapter"),
        ({"response_format": '{"type": "regex"}'}, "invalid_value", "response_format.regex"),
        ({"options": "none"}, "invalid_value", "options"),
        ({"prompt": "a"}, "invalid_value", "prompt"),
        ({"latest_image": True}, "image_invalid", "latest_image"),
    ],
)
def test_what_is_refused_aborts_with_its_code(
    ros: Any, node: str, fields: dict[str, Any], code: str, field: str
) -> None:
    state, result = ros.send(node, goal(ros, "Hello", **fields)).end()
    assert (state, result.error_code, result.error_field) == ("aborted", code, field)


def test_an_answer_has_the_form_that_is_asked(ros: Any, node: str) -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    _, result = ros.send(node, goal(ros, "Hall light on", response_format=json.dumps(form))).end()
    assert json.loads(result.text).keys() == {"room", "on"}


def test_options_are_those_of_the_goal(ros: Any, node: str) -> None:
    fields = {"temperature": 1.0, "seed": 7, "max_tokens": 5, "top_k": 50}
    one, two = (ros.send(node, goal(ros, "Hello", **fields)).end()[1] for _ in range(2))
    assert (one.text, one.reason, one.completion_tokens) == (two.text, "length", 5)


def test_a_tool_without_service_is_the_askers(ros: Any, node: str) -> None:
    question, tool = "What is the battery level?", Tool(**BATTERY)
    state, asked = ros.send(node, goal(ros, question, tools=[tool])).end()
    assert (state, asked.reason) == ("succeeded", "tool_calls")
    (call,) = asked.tool_calls
    assert (call.name, call.arguments) == ("get_battery", "{}")
    turns = [
        Turn(role="user", content=question),
        Turn(role="assistant", tool_calls=[call]),
        Turn(role="tool", content='{"level": 81}', tool_call_id=call.id),
    ]
    _, result = ros.send(node, ros.goal_type(messages=turns, tools=[tool])).end()
    assert result.text == "The level is 81."


@pytest.mark.parametrize(
    ("kind", "answer", "text"),
    [
        ("hearth_msgs/CallTool", {"success": True, "content": '{"level": 81}'}, "The level is 81."),
        ("std_srvs/Trigger", {"success": True, "message": '{"level": 64}'}, "The level is 64."),
        (
            "hearth_msgs/CallTool",
            {"success": False, "content": "no signal"},
            "That did not work: no signal.",
        ),
    ],
)
def test_a_tool_is_answered_by_a_service(
    ros: Any, node: str, kind: str, answer: dict[str, Any], text: str
) -> None:
    asked: list[Any] = []
    service = f"/battery_{abs(hash((kind, text)))}"
    ros.serve(service, kind, lambda request: asked.append(request) or answer)
    tool = Tool(**BATTERY, service=service, service_type=kind)
    sent = ros.send(node, goal(ros, "What is the battery level?", tools=[tool]))
    _, result = sent.end()
    assert (result.text, result.rounds, result.reason) == (text, 2, "stop")
    (request,) = asked
    if kind == "hearth_msgs/CallTool":
        assert (request.name, request.arguments) == ("get_battery", "{}")
    (calls,) = [one.tool_calls for one in heard(sent) if one.tool_calls]
    assert [one.name for one in calls] == ["get_battery"]


def test_a_tool_that_switches(ros: Any, node: str) -> None:
    asked: list[Any] = []
    ros.serve("/lamp", "std_srvs/SetBool", lambda one: asked.append(one.data) or {"success": True})
    tool = Tool(
        name="set_lamp",
        parameters='{"type": "object", "properties": {"on": {"const": true}}, "required": ["on"]}',
        service="/lamp",
        service_type="std_srvs/SetBool",
    )
    fields = {"tools": [tool], "tool_choice": "set_lamp", "max_tokens": 64}
    _, result = ros.send(node, goal(ros, "Turn on the lamp", **fields)).end()
    assert asked == [True]
    assert result.rounds == 2


def test_a_service_that_is_not_there_is_told_to_the_model(ros: Any, home: Any) -> None:
    parameters = {"address": str(home.socket), "tool_timeout_s": 1}
    with ros.hearth("impatient", **parameters) as process:
        tool = Tool(**BATTERY, service="/nowhere")
        sent = ros.send("impatient", goal(ros, "What is the battery level?", tools=[tool]))
        state, result = sent.end()
    assert (state, result.rounds) == ("succeeded", 2)
    assert result.text.startswith("That did not work")
    assert "/nowhere" in process.log()
