import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
from ros_messages import make

from hearth_client import HearthClientError
from hearth_ros.bridge import OK, Bridge, Diagnosis
from hearth_ros.requests import ServiceTool
from hearth_ros.settings import Settings
from hearth_ros.talk import Outcome, Piece
from tests.daemon.door.harness import running_door

PATIENCE_S = 10.0
TOOL = {"name": "f", "service": "/f"}
NOTHING: Callable[[Piece], None] = lambda _: None  # noqa: E731 - a callback


class FakeNode:
    """Outlets that tests read; `answer` is what a tool's service gives."""

    def __init__(self) -> None:
        self.said: Queue[tuple[str, str]] = Queue()
        self.diagnoses: Queue[Diagnosis] = Queue()
        self.warnings: Queue[str] = Queue()
        self.asked: Queue[dict[str, Any]] = Queue()
        self.answer: object = SimpleNamespace(success=True, content="21 degrees")

    def publish(self, topic: str, text: str) -> None:
        self.said.put((topic, text))

    def publish_diagnosis(self, diagnosis: Diagnosis) -> None:
        self.diagnoses.put(diagnosis)

    def call_service(self, _: ServiceTool, fields: dict[str, Any]) -> "Future[Any]":
        future: Future[Any] = Future()
        self.asked.put(fields)
        if isinstance(self.answer, Exception):
            future.set_exception(self.answer)
        elif self.answer is not None:
            future.set_result(self.answer)
        return future

    def warn(self, text: str) -> None:
        self.warnings.put(text)

    def until(self, *topics: str) -> list[tuple[str, str]]:
        """All that is said up to the first text of one of these topics."""
        found = [self.said.get(timeout=PATIENCE_S)]
        while found[-1][0] not in topics:
            found.append(self.said.get(timeout=PATIENCE_S))
        return found


@contextmanager
def bridge_of(node: FakeNode, address: Path, **settings: Any) -> Iterator[Bridge]:
    bridge = Bridge(node, Settings(address=str(address), diagnostics_period_s=0, **settings))
    bridge.start()
    try:
        yield bridge
    finally:
        bridge.stop()


@pytest.fixture(scope="module")
def door() -> Iterator[Any]:
    with running_door(step_s=0.02) as running:
        yield running


@pytest.fixture
def node() -> FakeNode:
    return FakeNode()


def goal(word: str, **values: Any) -> Any:
    return make("Generate", messages=[make("Turn", role="user", content=word)], **values)


def ended(bridge: Bridge, message: Any, on_piece: Callable[[Piece], None] = NOTHING) -> Outcome:
    return bridge.generate(message, 0.0, on_piece).future.result(PATIENCE_S)


def test_a_goal_streams_and_ends(door: Any, node: FakeNode) -> None:
    pieces: list[Piece] = []
    with bridge_of(node, door.path) as bridge:
        outcome = ended(bridge, goal("count", max_tokens=5), pieces.append)
    assert (outcome.text, outcome.reason, outcome.rounds) == ("0 1 2 3 4 ", "length", 1)
    assert (outcome.completion_tokens, outcome.error_code) == (5, "")
    assert outcome.request
    assert "".join(one.text for one in pieces) == outcome.text
    assert [one.seq for one in pieces] == list(range(len(pieces)))
    assert [token for one in pieces for token in one.tokens] == [0, 1, 2, 3, 4]


def test_a_goal_is_cancelled(door: Any, node: FakeNode) -> None:
    began: Queue[Piece] = Queue()
    with bridge_of(node, door.path) as bridge:
        running = bridge.generate(goal("count", max_tokens=2_000_000_000), 0.0, began.put)
        assert running.future.result(PATIENCE_S).error_code == "invalid_value"
        running = bridge.generate(goal("count", max_tokens=10_000), 0.0, began.put)
        began.get(timeout=PATIENCE_S)
        running.cancel()
        outcome = running.future.result(PATIENCE_S)
        running.cancel()
    assert (outcome.reason, outcome.error_code) == ("cancelled", "")
    assert outcome.text


def test_a_goal_that_is_cancelled_at_once_never_asks(door: Any, node: FakeNode) -> None:
    with bridge_of(node, door.path) as bridge:
        running = bridge.generate(goal("hang"), 0.0, NOTHING)
        running.cancel()
        assert running.future.result(PATIENCE_S).reason == "cancelled"


@pytest.mark.parametrize(
    ("message", "code", "field"),
    [
        (goal("fail"), "executor_failed", "device"),
        (goal("a", options='{"max_token": 2}'), "unsupported_option", "max_token"),
        (goal("a", latest_image=True), "image_invalid", "latest_image"),
        (make("Generate", prompt="a", latest_image=True), "invalid_value", "latest_image"),
        (goal("a", adapter="none"), "adapter_unknown", "adapter"),
    ],
)
def test_an_error_is_an_outcome(
    door: Any, node: FakeNode, message: Any, code: str, field: str
) -> None:
    with bridge_of(node, door.path) as bridge:
        outcome = ended(bridge, message)
    assert (outcome.error_code, outcome.error_field, outcome.reason) == (code, field, "")
    assert outcome.error_message


def test_a_call_without_service_goes_to_the_asker(door: Any, node: FakeNode) -> None:
    with bridge_of(node, door.path) as bridge:
        outcome = ended(bridge, goal("a", tools=[make("Tool", name="f")]))
    assert (outcome.reason, outcome.rounds, outcome.reasoning) == ("tool_calls", 1, "hm")
    assert [(one.name, one.arguments) for one in outcome.tool_calls] == [("f", '{"a":1}')]
    assert node.asked.empty()


@pytest.mark.parametrize(
    ("answer", "told", "warning"),
    [
        (SimpleNamespace(success=True, content="21 degrees"), "21 degrees", ""),
        (SimpleNamespace(success=True, message=""), '{"ok":true}', ""),
        (SimpleNamespace(success=False, content="no lamp"), '{"error":"no lamp"}', ""),
        (RuntimeError("secret"), '{"error":"the tool failed"}', "/f failed: secret"),
        (None, '{"error":"no answer in time"}', "/f has not answered within 0.2 s"),
    ],
)
def test_a_call_is_answered_by_its_service(
    door: Any, node: FakeNode, answer: object, told: str, warning: str
) -> None:
    node.answer = answer
    pieces: list[Piece] = []
    with bridge_of(node, door.path, tool_timeout_s=0.2) as bridge:
        message = goal("a", max_tokens=3, tools=[make("Tool", **TOOL)], tool_choice="f")
        outcome = ended(bridge, message, pieces.append)
    fields = node.asked.get(timeout=PATIENCE_S)
    assert (fields["name"], fields["arguments"]) == ("f", '{"a":1}')
    assert (outcome.text, outcome.rounds, outcome.tool_calls) == ("0 1 2 ", 2, [])
    asked = door.actors.prepared[-1].chat
    assert [turn.role for turn in asked.turns] == ["user", "assistant", "tool"]
    assert asked.turns[2].content == told
    assert [one.round for one in pieces] == sorted(one.round for one in pieces)
    assert [one.tool_calls[0].id for one in pieces if one.tool_calls] == [fields["id"]]
    assert ([] if node.warnings.empty() else [node.warnings.get()]) == (
        [warning] if warning else []
    )


@pytest.mark.parametrize("kind", ["std_srvs/SetBool", "std_srvs/Trigger"])
def test_arguments_that_a_service_has_no_place_for_are_told(
    door: Any, node: FakeNode, kind: str
) -> None:
    with bridge_of(node, door.path) as bridge:
        tool = make("Tool", **TOOL, service_type=kind)
        assert ended(bridge, goal("a", max_tokens=3, tools=[tool])).rounds == 2
    assert node.asked.empty()
    assert "takes no such arguments" in node.warnings.get()
    assert "wrong" in door.actors.prepared[-1].chat.turns[2].content


def test_rounds_are_bounded(door: Any, node: FakeNode) -> None:
    with bridge_of(node, door.path, max_rounds=1) as bridge:
        outcome = ended(bridge, goal("a", tools=[make("Tool", **TOOL)]))
    assert (outcome.rounds, outcome.reason) == (1, "tool_calls")
    assert outcome.tool_calls
    assert "still calls" in node.warnings.get()


def test_a_goal_that_waits_for_a_tool_is_cancelled(door: Any, node: FakeNode) -> None:
    node.answer = None
    with bridge_of(node, door.path) as bridge:
        running = bridge.generate(goal("a", tools=[make("Tool", **TOOL)]), 0.0, NOTHING)
        node.asked.get(timeout=PATIENCE_S)
        running.cancel()
        assert running.future.result(PATIENCE_S).reason == "cancelled"


def test_a_stop_ends_what_runs_with_an_outcome(door: Any, node: FakeNode) -> None:
    with bridge_of(node, door.path) as bridge:
        running = bridge.generate(goal("hang"), 0.0, NOTHING)
    assert running.future.result(PATIENCE_S).reason == "cancelled"


def test_a_prompt_is_answered_with_what_was_said_before(door: Any, node: FakeNode) -> None:
    with bridge_of(node, door.path, system_prompt="Be brief.", max_tokens=3) as bridge:
        for word in ("one", "two"):
            bridge.prompt(word, 0.0)
        for _ in range(2):
            said = node.until("response")
            assert "".join(text for topic, text in said if topic == "stream") == "0 1 2 "
            assert said[-2:] == [("sentences", "0 1 2"), ("response", "0 1 2 ")]
        bridge.prompt("fail", 0.0)
        assert node.until("error", "response")[-1] == (
            "error",
            "executor_failed: the executor died",
        )
    turns = door.actors.prepared[-1].chat.turns
    assert [turn.content for turn in turns] == [
        "Be brief.",
        "one",
        "0 1 2 ",
        "two",
        "0 1 2 ",
        "fail",
    ]


def test_a_prompt_with_a_tool_remembers_call_and_result(
    door: Any, node: FakeNode, tmp_path: Path
) -> None:
    (tmp_path / "tools.json").write_text(json.dumps([TOOL]))
    tools = {"tools_file": str(tmp_path / "tools.json")}
    with bridge_of(node, door.path, max_tokens=2, **tools) as bridge:
        bridge.prompt("one", 0.0)
        said = node.until("response")
        bridge.prompt("two", 0.0)
        node.until("response")
    # A piece that was spoken before the tool was asked is a sentence of its own.
    assert [text for topic, text in said if topic == "sentences"] == ["ok", "0 1"]
    roles = [turn.role for turn in door.actors.prepared[-1].chat.turns]
    assert roles == ["user", "assistant", "tool", "assistant", "user", "assistant", "tool"]


def test_more_prompts_than_may_wait_are_refused(door: Any, node: FakeNode) -> None:
    with bridge_of(node, door.path, queue=1) as bridge:
        bridge.prompt("count", 0.0)
        node.until("stream")
        bridge.prompt("two", 0.0)
        bridge.prompt("three", 0.0)
        assert node.until("error")[-1][1].startswith("queue_full: ")


def test_a_new_prompt_interrupts(door: Any, node: FakeNode) -> None:
    with bridge_of(node, door.path, interrupt=True) as bridge:
        bridge.prompt("count", 0.0)
        node.until("stream")
        bridge.prompt("fail", 0.0)
        # One response or error for each prompt, in their order.
        assert node.until("response", "error")[-1][0] == "response"
        assert node.until("response", "error")[-1][0] == "error"


def test_a_picture_goes_with_the_prompt(door: Any, node: FakeNode) -> None:
    jpeg = SimpleNamespace(format="jpeg", data=b"\xff\xd8\xff")
    with bridge_of(node, door.path, late_frame_s=1.0) as bridge:
        bridge.images.offer(jpeg, stamp_s=10.0, now_s=10.0)
        bridge.prompt("what is this?", 13.0)
        # This door's model sees nothing, and an option is honoured or refused.
        assert node.until("response", "error")[-1][1].startswith("unsupported_option: ")
        assert node.warnings.get() == "the newest picture is 3.0 s old"
        assert ended(bridge, goal("a", latest_image=True)).error_code == "unsupported_option"
        bridge.images.offer(SimpleNamespace(format="jpeg", data=b"?"), stamp_s=0.0, now_s=20.0)
        bridge.prompt("and this?", 20.0)
        assert node.until("response", "error")[-1][1].startswith("image_invalid: ")


def test_services(door: Any, node: FakeNode) -> None:
    turn = make("Turn", role="user", content="ab")
    with bridge_of(node, door.path) as bridge:
        assert bridge.tokenize("a", []).result(PATIENCE_S) == {"tokens": [97]}
        assert bridge.tokenize("", [turn]).result(PATIENCE_S) == {"tokens": [97, 98]}
        assert bridge.tokenize("a", [turn]).result(PATIENCE_S)["error_code"] == "invalid_value"
        assert bridge.detokenize([97, 98]).result(PATIENCE_S) == {"text": "ab"}
        assert bridge.adapters().result(PATIENCE_S) == {"adapters": []}
        metadata = bridge.metadata().result(PATIENCE_S)
        assert (metadata["model"], metadata["server"]) == ("toy", "hearth test")
        assert json.loads(metadata["limits"])["total_tokens"] == 100
        assert bridge.health().result(PATIENCE_S) == {"success": True, "message": "toy is ready"}


def test_an_answer_that_does_not_come_is_an_error(door: Any, node: FakeNode) -> None:
    with bridge_of(node, door.path, request_timeout_s=0.2) as bridge:
        found = bridge.tokenize("silent", []).result(PATIENCE_S)
    assert found["error_code"] == "connection_timeout"


def test_diagnostics(door: Any, node: FakeNode) -> None:
    bridge = Bridge(node, Settings(address=str(door.path)))
    bridge.start()
    found = node.diagnoses.get(timeout=PATIENCE_S)
    bridge.stop()
    assert (found.level, found.message) == (OK, "toy is ready")
    assert (found.values["state"], found.values["pictures late"]) == ("ready", "0")


def test_a_daemon_that_is_away(tmp_path: Path, node: FakeNode) -> None:
    with bridge_of(node, tmp_path / "none.sock", connect_timeout_s=0.2) as bridge:
        assert ended(bridge, goal("a")).error_code == "connection_timeout"
        assert bridge.metadata().result(PATIENCE_S)["error_code"] == "connection_timeout"
        assert bridge.health().result(PATIENCE_S)["success"] is False
        bridge.prompt("a", 0.0)
        assert node.until("error")[-1][1].startswith("connection_timeout: ")


@pytest.mark.parametrize(
    ("settings", "field"),
    [({"options": "{"}, "options"), ({"response_format": "x"}, "response_format")],
)
def test_settings_that_are_wrong_are_refused(
    node: FakeNode, settings: dict[str, Any], field: str
) -> None:
    with pytest.raises(HearthClientError) as caught:
        Bridge(node, Settings(**settings))
    assert caught.value.field == field


def test_tools_of_prompts_need_a_service(node: FakeNode, tmp_path: Path) -> None:
    (tmp_path / "tools.json").write_text('[{"name": "f"}]')
    with pytest.raises(HearthClientError, match="has no service"):
        Bridge(node, Settings(tools_file=str(tmp_path / "tools.json")))
