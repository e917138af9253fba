"""ROS 1 as the tests use it, by a node of their own in this process."""

import os
import socket
import sys
import time
import xmlrpc.client
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Queue
from threading import Event
from typing import Any

import actionlib
import rospy
import std_srvs.srv
from actionlib_msgs.msg import GoalStatus
from diagnostic_msgs.msg import DiagnosticArray
from processes import PATIENCE_S, Process
from rosbags.rosbag1 import Reader, Writer
from rosbags.typesys import Stores
from sensor_msgs.msg import CompressedImage, Image
from std_msgs.msg import String

import hearth_msgs.srv
from hearth_msgs.msg import GenerateAction, GenerateGoal

TYPES = {"String": String, "Image": Image, "CompressedImage": CompressedImage}
SERVICES = {
    "hearth_msgs/CallTool": hearth_msgs.srv.CallTool,
    "std_srvs/SetBool": std_srvs.srv.SetBool,
    "std_srvs/Trigger": std_srvs.srv.Trigger,
}
OWN = {
    "tokenize": hearth_msgs.srv.Tokenize,
    "detokenize": hearth_msgs.srv.Detokenize,
    "metadata": hearth_msgs.srv.GetMetadata,
    "adapters": hearth_msgs.srv.ListAdapters,
    "health": std_srvs.srv.Trigger,
}
STORE = Stores.ROS1_NOETIC
_STATES = {
    GoalStatus.SUCCEEDED: "succeeded",
    GoalStatus.PREEMPTED: "cancelled",
    GoalStatus.ABORTED: "aborted",
}


class Goal:
    """A goal that was sent: its feedback as it comes, and its end."""

    def __init__(self, client: Any, goal: Any) -> None:
        self.feedback: Queue[Any] = Queue()
        self._ended = Event()
        self._handle = client.send_goal(
            goal, self._changed, lambda _, feedback: self.feedback.put(feedback)
        )

    def _changed(self, handle: Any) -> None:
        if handle.get_comm_state() == actionlib.CommState.DONE:
            self._ended.set()

    def cancel(self) -> None:
        self._handle.cancel()

    def end(self) -> tuple[str, Any]:
        """State and result."""
        assert self._ended.wait(PATIENCE_S)
        return _STATES[self._handle.get_goal_status()], self._handle.get_result()


class Ros:
    """Topics, services and the action, for tests; each wait has a deadline."""

    version = 1
    goal_type = GenerateGoal

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        uri = f"http://127.0.0.1:{port}"
        os.environ |= {
            "ROS_MASTER_URI": uri,
            "ROS_IP": "127.0.0.1",
            "ROS_LOG_DIR": str(folder),
            "ROS_HOME": str(folder),
        }
        command = ["/usr/bin/rosmaster", "--core", "-p", str(port)]
        self._master = Process(command, folder / "master.log", dict(os.environ))
        with xmlrpc.client.ServerProxy(uri) as master:
            _until(lambda: _answers(master), "no master")
        rospy.init_node("probe", disable_signals=True)
        self._publishers: dict[str, tuple[Any, Event]] = {}

    def close(self) -> None:
        rospy.signal_shutdown("the tests are over")
        self._master.__exit__()

    @contextmanager
    def hearth(self, name: str, **parameters: Any) -> Iterator[Process]:
        """A node of this name, ready to be asked."""
        with self.starting(name, **parameters) as process:
            rospy.wait_for_service(f"/{name}/health", PATIENCE_S)
            yield process

    @contextmanager
    def starting(self, name: str, **parameters: Any) -> Iterator[Process]:
        """A node of this name, from its start on."""
        with suppress(KeyError):
            rospy.delete_param(f"/{name}")
        for key, value in parameters.items():
            rospy.set_param(f"/{name}/{key}", value)
        command = [sys.executable, "-m", "hearth_ros1.node", f"__name:={name}"]
        with Process(command, self._folder / f"{name}.log", dict(os.environ)) as process:
            yield process

    def listen(self, topic: str, kind: Any = String) -> "Queue[Any]":
        """Messages of a topic, from now on."""
        found: Queue[Any] = Queue()
        rospy.Subscriber(topic, kind, found.put)
        _until(lambda: self._is_connected(topic), f"nobody publishes {topic}")
        return found

    def _is_connected(self, topic: str) -> bool:
        """True if those who publish have taken the connection: their side is the later one."""
        master = rospy.get_master()
        publishers = dict(master.getSystemState()[2][0]).get(topic, [])
        return bool(publishers) and all(
            _sends(master.lookupNode(name)[2], topic) for name in publishers
        )

    def diagnostics(self) -> "Queue[Any]":
        return self.listen("/diagnostics", DiagnosticArray)

    def publish(self, topic: str, message: Any, kind: str = "String") -> None:
        """Publish text, or a message's bytes as a bag has them."""
        if topic not in self._publishers:
            matched = Event()
            listener = _Listener(matched)
            made = rospy.Publisher(topic, TYPES[kind], subscriber_listener=listener, queue_size=10)
            self._publishers[topic] = made, matched
        publisher, matched = self._publishers[topic]
        assert matched.wait(PATIENCE_S), f"nobody hears {topic}"
        publisher.publish(message if kind == "String" else self.message(kind, message))

    def message(self, kind: str, data: bytes) -> Any:
        """A message from its bytes in a bag."""
        return TYPES[kind]().deserialize(bytes(data))

    def serve(self, service: str, kind: str, answer: Callable[[Any], dict[str, Any]]) -> None:
        """Answer a service with fields of its response."""
        rospy.Service(service, SERVICES[kind], answer)

    def call(self, name: str, service: str, **fields: Any) -> Any:
        """The response of one of the node's services."""
        rospy.wait_for_service(f"/{name}/{service}", PATIENCE_S)
        return rospy.ServiceProxy(f"/{name}/{service}", OWN[service])(**fields)

    def send(self, name: str, goal: Any) -> Goal:
        """Send a goal."""
        client = actionlib.ActionClient(f"/{name}/generate", GenerateAction)
        assert client.wait_for_server(rospy.Duration(PATIENCE_S))
        return Goal(client, goal)


class _Listener(rospy.SubscribeListener):
    def __init__(self, matched: Event) -> None:
        super().__init__()
        self._matched = matched

    def peer_subscribe(self, *_: object) -> None:
        self._matched.set()


def _until(condition: Callable[[], object], message: str) -> None:
    """Wait where ROS 1 has no event for it."""
    deadline, pause = time.monotonic() + PATIENCE_S, Event()
    while not condition():
        assert time.monotonic() < deadline, message
        pause.wait(0.01)


def _answers(master: Any) -> bool:
    try:
        return master.getSystemState("/probe")[0] == 1
    except OSError:
        return False


def _sends(uri: str, topic: str) -> bool:
    with xmlrpc.client.ServerProxy(uri) as node:
        return any(
            (connection[1], connection[2], connection[4]) == ("/probe", "o", topic)
            for connection in node.getBusInfo("/probe")[2]
        )


def write_bag(path: Path) -> Any:
    """A bag to write."""
    return Writer(path)


def read_bag(path: Path) -> Any:
    """A bag to read."""
    return Reader(path)
