"""ROS 2 as the tests use it, by a node of their own in this process."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from threading import Event, Thread
from typing import Any

import rclpy
from action_msgs.msg import GoalStatus
from diagnostic_msgs.msg import DiagnosticArray
from processes import PATIENCE_S, Process
from rclpy.action import ActionClient
from rclpy.callback_groups import ReentrantCallbackGroup
from rclpy.event_handler import PublisherEventCallbacks, SubscriptionEventCallbacks
from rclpy.executors import SingleThreadedExecutor
from rclpy.qos import QoSProfile
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
    "Tokenize": hearth_msgs.srv.Tokenize,
    "Detokenize": hearth_msgs.srv.Detokenize,
    "GetMetadata": hearth_msgs.srv.GetMetadata,
    "ListAdapters": hearth_msgs.srv.ListAdapters,
    "Trigger": Trigger,
}
STORE = Stores.LATEST
_KEEP = QoSProfile(depth=512)
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
            client = ActionClient(self.node, Generate, f"/{name}/generate")
            assert client.wait_for_server(PATIENCE_S), process.log()
            health, _ = self.call(name, "Trigger", "health"), client.destroy()
            assert health.message, process.log()
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
        from rclpy.serialization import deserialize_message  # noqa: PLC0415 - beside its use

        return deserialize_message(data, TYPES[kind])

    def serve(self, service: str, kind: str, answer: Callable[[Any], dict[str, Any]]) -> None:
        """Answer a service with fields of its response."""

        def respond(request: Any, response: Any) -> Any:
            for name, value in answer(request).items():
                setattr(response, name, value)
            return response

        self.node.create_service(SERVICES[kind], service, respond, callback_group=self._group)

    def call(self, name: str, kind: str, service: str, **fields: Any) -> Any:
        """The response of one of the node's services."""
        client = self.node.create_client(
            SERVICES[kind], f"/{name}/{service}", callback_group=self._group
        )
        assert client.wait_for_service(PATIENCE_S), f"there is no {service}"
        found: Queue[Any] = Queue()
        asked = client.call_async(SERVICES[kind].Request(**fields))
        asked.add_done_callback(lambda one: found.put(one.result()))
        return found.get(timeout=PATIENCE_S)

    def send(self, name: str, goal: Any) -> Goal | None:
        """Send a goal; None where it is rejected."""
        client = ActionClient(
            self.node, Generate, f"/{name}/generate", feedback_sub_qos_profile=_KEEP
        )
        assert client.wait_for_server(PATIENCE_S)
        feedback, handles = Queue[Any](), Queue[Any]()
        sent = client.send_goal_async(goal, lambda one: feedback.put(one.feedback))
        sent.add_done_callback(lambda one: handles.put(one.result()))
        handle = handles.get(timeout=PATIENCE_S)
        return Goal(handle, feedback) if handle.accepted else None

    def change_state(self, name: str, transition: str) -> bool:
        """Ask for a transition of the lifecycle."""
        from lifecycle_msgs.srv import ChangeState  # noqa: PLC0415 - no such thing in ROS 1

        client = self.node.create_client(
            ChangeState, f"/{name}/change_state", callback_group=self._group
        )
        assert client.wait_for_service(PATIENCE_S)
        request = ChangeState.Request()
        request.transition.label = transition
        found: Future[Any] = Future()
        client.call_async(request).add_done_callback(lambda one: found.set_result(one.result()))
        return bool(found.result(PATIENCE_S).success)


def write_bag(path: Path) -> Any:
    """A bag to write."""
    return Writer(path, version=9, storage_plugin=StoragePlugin.SQLITE3)


def read_bag(path: Path) -> Any:
    """A bag to read."""
    return Reader(path)
