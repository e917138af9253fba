"""ROS 2 as the tests use it, by a node of their own in this process."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, Queue
from threading import Event, Thread
from typing import Any

import rclpy
from action_msgs.msg import GoalStatus
from diagnostic_msgs.msg import DiagnosticArray
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState, GetState
from processes import PATIENCE_S, Process
from rclpy.action import ActionClient
from rclpy.callback_groups import ReentrantCallbackGroup
from rclpy.event_handler import PublisherEventCallbacks, SubscriptionEventCallbacks
from rclpy.executors import SingleThreadedExecutor
from rclpy.qos import QoSProfile
from rclpy.serialization import deserialize_message
from rosbags.rosbag2 import Reader, StoragePlugin, Writer
from rosbags.typesys import Stores
from sensor_msgs.msg import CompressedImage, Image
from std_msgs.msg import String
from std_srvs.srv import SetBool, Trigger

import hearth_msgs.srv
from hearth_msgs.action import Generate

TYPES = {"String": String, "Image": Image, "CompressedImage": CompressedImage}
SERVICES = {
    "hearth_msgs/CallTool": hearth_msgs.srv.CallTool,
    "std_srvs/SetBool": SetBool,
    "std_srvs/Trigger": Trigger,
}
OWN = {
    "tokenize": hearth_msgs.srv.Tokenize,
    "detokenize": hearth_msgs.srv.Detokenize,
    "metadata": hearth_msgs.srv.GetMetadata,
    "adapters": hearth_msgs.srv.ListAdapters,
    "health": Trigger,
    "change_state": ChangeState,
}
STORE = Stores.LATEST
_KEEP = QoSProfile(depth=512)
_ASK_S = 3.0
_STATES = {
    GoalStatus.STATUS_SUCCEEDED: "succeeded",
    GoalStatus.STATUS_CANCELED: "cancelled",
    GoalStatus.STATUS_ABORTED: "aborted",
}


class Goal:
    """A goal that was sent: its feedback as it comes, and its end."""

    def __init__(self, handle: Any, feedback: "Queue[Any]") -> None:
        self.feedback = feedback
        self._handle = handle
        self._result: Queue[Any] = Queue()
        handle.get_result_async().add_done_callback(lambda one: self._result.put(one.result()))

    def cancel(self) -> None:
        self._handle.cancel_goal_async()

    def end(self) -> tuple[str, Any]:
        """State and result."""
        found = self._result.get(timeout=PATIENCE_S)
        return _STATES[found.status], found.result


class Clients:
    """Clients of one node's services and action; made when it is first asked.

    An answer is lost while the node has not discovered who asks. Discovery goes in order, so that
    an answer to the client that was made last says that all others are known.
    """

    def __init__(self, node: Any, name: str, group: Any) -> None:
        self._node = node
        self.action = ActionClient(
            node, Generate, f"/{name}/generate", feedback_sub_qos_profile=_KEEP
        )
        self.services = {
            service: node.create_client(kind, f"/{name}/{service}", callback_group=group)
            for service, kind in OWN.items()
        }
        self._last = node.create_client(GetState, f"/{name}/get_state", callback_group=group)

    def ask(self, service: str, **fields: Any) -> Any:
        client = self.services[service]
        assert client.wait_for_service(PATIENCE_S), f"there is no {service}"
        return _answer(client, client.srv_type.Request(**fields), PATIENCE_S)

    def meet(self) -> None:
        """Wait until the node answers."""
        assert self._last.wait_for_service(PATIENCE_S), "there is no node"
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                _answer(self._last, GetState.Request(), _ASK_S)
            except Empty:  # noqa: PERF203 - it is what the loop is for
                assert time.monotonic() < deadline, "the node does not answer"
            else:
                return

    def destroy(self) -> None:
        self.action.destroy()
        for client in (*self.services.values(), self._last):
            self._node.destroy_client(client)


def _answer(client: Any, request: Any, seconds: float) -> Any:
    found: Queue[Any] = Queue()
    client.call_async(request).add_done_callback(lambda one: found.put(one.result()))
    return found.get(timeout=seconds)


class Ros:
    """Topics, services and the action, for tests; each wait has a deadline."""

    version = 2
    goal_type = Generate.Goal

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        rclpy.init()
        self.node = rclpy.create_node("probe")
        self._group = ReentrantCallbackGroup()
        self._executor = SingleThreadedExecutor()
        self._executor.add_node(self.node)
        self._thread = Thread(target=self._executor.spin)
        self._thread.start()
        self._met: dict[str, Clients] = {}
        self._publishers: dict[str, tuple[Any, Event]] = {}

    def close(self) -> None:
        self._executor.shutdown()
        self._thread.join(PATIENCE_S)
        self.node.destroy_node()
        rclpy.shutdown()

    @contextmanager
    def hearth(self, name: str, **parameters: Any) -> Iterator[Process]:
        """A node of this name, ready to be asked."""
        with self.starting(name, **parameters) as process:
            assert self._clients(name).action.wait_for_server(PATIENCE_S), process.log()
            yield process

    @contextmanager
    def starting(self, name: str, **parameters: Any) -> Iterator[Process]:
        """A node of this name, from its start on."""
        file = self._folder / f"{name}.yaml"
        # JSON is YAML.
        file.write_text(json.dumps({f"/{name}": {"ros__parameters": parameters}}))
        arguments = ["--ros-args", "-r", f"__node:={name}", "--params-file", str(file)]
        command = [sys.executable, "-m", "hearth_ros2.node", *arguments]
        with Process(command, self._folder / f"{name}.log", dict(os.environ)) as process:
            yield process
        if name in self._met:
            self._met.pop(name).destroy()

    def _clients(self, name: str) -> Clients:
        if name not in self._met:
            self._met[name] = Clients(self.node, name, self._group)
            self._met[name].meet()
        return self._met[name]

    def listen(self, topic: str, kind: Any = String) -> "Queue[Any]":
        """Messages of a topic, from now on."""
        found, matched = Queue[Any](), Event()
        events = SubscriptionEventCallbacks(matched=lambda _: matched.set())
        self.node.create_subscription(
            kind, topic, found.put, _KEEP, callback_group=self._group, event_callbacks=events
        )
        assert matched.wait(PATIENCE_S), f"nobody publishes {topic}"
        return found

    def diagnostics(self) -> "Queue[Any]":
        return self.listen("/diagnostics", DiagnosticArray)

    def publish(self, topic: str, message: Any, kind: str = "String") -> None:
        """Publish text, or a message's bytes as a bag has them."""
        if topic not in self._publishers:
            matched = Event()
            events = PublisherEventCallbacks(matched=lambda _: matched.set())
            made = self.node.create_publisher(TYPES[kind], topic, 10, event_callbacks=events)
            self._publishers[topic] = made, matched
        publisher, matched = self._publishers[topic]
        assert matched.wait(PATIENCE_S), f"nobody hears {topic}"
        publisher.publish(String(data=message) if kind == "String" else message)

    def message(self, kind: str, data: bytes) -> Any:
        """A message from its bytes in a bag."""
        return deserialize_message(data, TYPES[kind])

    def serve(self, service: str, kind: str, answer: Callable[[Any], dict[str, Any]]) -> None:
        """Answer a service with fields of its response."""

        def respond(request: Any, response: Any) -> Any:
            for name, value in answer(request).items():
                setattr(response, name, value)
            return response

        self.node.create_service(SERVICES[kind], service, respond, callback_group=self._group)

    def call(self, name: str, service: str, **fields: Any) -> Any:
        """The response of one of the node's services."""
        return self._clients(name).ask(service, **fields)

    def send(self, name: str, goal: Any) -> Goal | None:
        """Send a goal; None where it is rejected."""
        feedback, handles = Queue[Any](), Queue[Any]()
        client = self._clients(name).action
        sent = client.send_goal_async(goal, lambda one: feedback.put(one.feedback))
        sent.add_done_callback(lambda one: handles.put(one.result()))
        handle = handles.get(timeout=PATIENCE_S)
        return Goal(handle, feedback) if handle.accepted else None

    def change_state(self, name: str, transition: str) -> bool:
        """Ask for a transition of the lifecycle."""
        asked = Transition(label=transition)
        return bool(self._clients(name).ask("change_state", transition=asked).success)


def write_bag(path: Path) -> Any:
    """A bag to write."""
    return Writer(path, version=9, storage_plugin=StoragePlugin.SQLITE3)


def read_bag(path: Path) -> Any:
    """A bag to read."""
    return Reader(path)
