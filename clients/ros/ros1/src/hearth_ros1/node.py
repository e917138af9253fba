"""The ROS 1 node between ROS and a Hearth daemon."""

import sys
from collections import Counter
from concurrent.futures import Future
from threading import Lock, Thread
from typing import Any

import actionlib
import rospy
from actionlib_msgs.msg import GoalStatus
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue
from sensor_msgs.msg import CompressedImage, Image
from std_msgs.msg import String
from std_srvs.srv import SetBool, Trigger, TriggerResponse

from hearth_client import HearthClientError
from hearth_msgs.msg import GenerateAction, GenerateFeedback, GenerateResult, ToolCall
from hearth_msgs.srv import (
    CallTool,
    Detokenize,
    DetokenizeResponse,
    GetMetadata,
    GetMetadataResponse,
    ListAdapters,
    ListAdaptersResponse,
    Tokenize,
    TokenizeResponse,
)
from hearth_ros.bridge import Bridge, Diagnosis, Goal
from hearth_ros.prompts import TOPICS, Topic
from hearth_ros.requests import ServiceTool
from hearth_ros.settings import Settings, read_settings
from hearth_ros.talk import Piece, fill

_TOOL_TYPES = {
    "hearth_msgs/CallTool": CallTool,
    "std_srvs/SetBool": SetBool,
    "std_srvs/Trigger": Trigger,
}
_QUEUE = 512
_CALLS = 8
_IMAGE_BYTES = 1 << 24


class HearthNode:
    """The node `hearth`; parameters are read once, at its start.

    Topics and goals are taken in rospy's threads and handed on at once. Each service request has a
    thread of its own there, which waits for the daemon.
    """

    def __init__(self, settings: Settings) -> None:
        self._bridge = Bridge(self, settings)
        # Twice as long as the bridge itself waits, so that its own error comes first.
        self._patience_s = 2 * (settings.request_timeout_s + settings.connect_timeout_s)
        self._tool_timeout_s = settings.tool_timeout_s
        self._goals: dict[str, Goal] = {}
        self._lock = Lock()
        self._asked: Counter[str] = Counter()
        self._texts = {
            topic: rospy.Publisher(f"~{topic}", String, queue_size=_QUEUE) for topic in TOPICS
        }
        self._diagnostics = rospy.Publisher("/diagnostics", DiagnosticArray, queue_size=10)

    def begin(self) -> None:
        """Connect all that comes in."""
        bridge = self._bridge
        bridge.start()
        rospy.on_shutdown(self._end)
        self._actions = actionlib.ActionServer(
            "~generate", GenerateAction, self._start, self._cancel, auto_start=False
        )
        self._actions.start()
        for topic, kind in (("~image", Image), ("~image/compressed", CompressedImage)):
            rospy.Subscriber(topic, kind, self._image, queue_size=1, buff_size=_IMAGE_BYTES)
        rospy.Subscriber("~prompt", String, self._prompt, queue_size=10)
        for name, kind, response, ask in (
            (
                "tokenize",
                Tokenize,
                TokenizeResponse,
                lambda r: bridge.tokenize(r.text, r.messages),
            ),
            ("detokenize", Detokenize, DetokenizeResponse, lambda r: bridge.detokenize(r.tokens)),
            ("metadata", GetMetadata, GetMetadataResponse, lambda _: bridge.metadata()),
            ("adapters", ListAdapters, ListAdaptersResponse, lambda _: bridge.adapters()),
            ("health", Trigger, TriggerResponse, lambda _: bridge.health()),
        ):
            rospy.Service(f"~{name}", kind, self._answering(response, ask))

    def _answering(self, response: Any, ask: Any) -> Any:
        def answer(request: Any) -> Any:
            return fill(response(), ask(request).result(self._patience_s), ToolCall)

        return answer

    def _prompt(self, message: String) -> None:
        self._bridge.prompt(message.data, rospy.get_time())

    def _image(self, message: Any) -> None:
        self._bridge.images.offer(message, message.header.stamp.to_sec(), rospy.get_time())

    # --- the action ---------------------------------------------------------------------------

    def _start(self, handle: Any) -> None:
        handle.set_accepted()

        def feed(piece: Piece) -> None:
            handle.publish_feedback(fill(GenerateFeedback(), piece, ToolCall))

        goal = self._bridge.generate(handle.get_goal(), rospy.get_time(), feed)
        key = handle.get_goal_id().id
        with self._lock:
            self._goals[key] = goal
        goal.future.add_done_callback(lambda ended: self._finish(handle, key, ended))

    def _cancel(self, handle: Any) -> None:
        with self._lock:
            goal = self._goals.get(handle.get_goal_id().id)
        if goal is not None:
            goal.cancel()

    def _finish(self, handle: Any, key: str, ended: "Future[Any]") -> None:
        """Tell the goal's end; called in the client's thread, or by `_start` for a refused goal."""
        with self._lock:
            self._goals.pop(key, None)
        outcome = ended.result()
        result = fill(GenerateResult(), outcome, ToolCall)
        asked = handle.get_goal_status().status == GoalStatus.PREEMPTING
        if outcome.reason == "cancelled" and asked:
            handle.set_canceled(result)
        elif outcome.error_code or outcome.reason == "cancelled":
            handle.set_aborted(result, outcome.error_message)
        else:
            handle.set_succeeded(result)

    # --- what the client's thread calls -------------------------------------------------------

    def publish(self, topic: Topic, text: str) -> None:
        """Publish a String."""
        self._texts[topic].publish(text)

    def publish_diagnosis(self, diagnosis: Diagnosis) -> None:
        """Publish a DiagnosticArray."""
        status = DiagnosticStatus(
            level=diagnosis.level,
            name=f"{rospy.get_name().lstrip('/')}: daemon",
            hardware_id="hearth",
            message=diagnosis.message,
            values=[KeyValue(key, value) for key, value in diagnosis.values.items()],
        )
        array = DiagnosticArray(status=[status])
        array.header.stamp = rospy.Time.now()
        self._diagnostics.publish(array)

    def call_service(self, tool: ServiceTool, fields: dict[str, Any]) -> "Future[Any]":
        """Ask a tool's service in a thread, as rospy has calls that wait, and without a deadline.

        Those that have not come back bound the calls of a service.
        """
        answer: Future[Any] = Future()
        with self._lock:
            if self._asked[tool.service] >= _CALLS:
                answer.set_exception(RuntimeError(f"{_CALLS} calls have not been answered"))
                return answer
            self._asked[tool.service] += 1

        def ask() -> None:
            try:
                rospy.wait_for_service(tool.service, self._tool_timeout_s)
                proxy = rospy.ServiceProxy(tool.service, _TOOL_TYPES[tool.service_type])
                response = proxy(**fields)
            except (rospy.ServiceException, rospy.ROSException) as error:
                failure: Exception | None = error
            else:
                failure = None
            with self._lock:
                self._asked[tool.service] -= 1
            if not answer.set_running_or_notify_cancel():
                return
            if failure is None:
                answer.set_result(response)
            else:
                answer.set_exception(failure)

        Thread(target=ask, name=f"tool {tool.service}", daemon=True).start()
        return answer

    def warn(self, text: str) -> None:
        """Log a warning."""
        rospy.logwarn("%s", text)

    def _end(self) -> None:
        """End goals, whose clients hear of it, and leave the daemon."""
        self._bridge.stop()


def main() -> None:
    """Run the node until SIGTERM or SIGINT; exits with 1 where it could not start."""
    rospy.init_node("hearth")
    try:
        node = HearthNode(read_settings(lambda name, default: rospy.get_param(f"~{name}", default)))
    except HearthClientError as error:
        rospy.logfatal("%s", error)
        sys.exit(1)
    node.begin()
    rospy.spin()


if __name__ == "__main__":
    main()
