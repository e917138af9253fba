"""The ROS 2 node: a lifecycle node between ROS and a Hearth daemon."""

import os
import signal
import sys
import time
from concurrent.futures import Future as ThreadFuture
from concurrent.futures import InvalidStateError
from contextlib import suppress
from threading import Thread
from typing import Any

import rclpy
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue
from rcl_interfaces.msg import ParameterDescriptor
from rclpy.action import ActionServer, CancelResponse, GoalResponse
from rclpy.callback_groups import ReentrantCallbackGroup
from rclpy.executors import ExternalShutdownException, ShutdownException, SingleThreadedExecutor
from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn
from rclpy.qos import QoSProfile, qos_profile_sensor_data
from rclpy.signals import SignalHandlerOptions
from rclpy.task import Future
from sensor_msgs.msg import CompressedImage, Image
from std_msgs.msg import String
from std_srvs.srv import SetBool, Trigger

from hearth_client import HearthClientError
from hearth_msgs.action import Generate
from hearth_msgs.msg import ToolCall
from hearth_msgs.srv import CallTool, Detokenize, GetMetadata, ListAdapters, Tokenize
from hearth_ros.bridge import Bridge, Diagnosis, Goal
from hearth_ros.prompts import TOPICS, Topic
from hearth_ros.requests import ServiceTool
from hearth_ros.settings import parameters, read_settings
from hearth_ros.talk import Piece, fill

_TOOL_TYPES = {
    "hearth_msgs/CallTool": CallTool,
    "std_srvs/SetBool": SetBool,
    "std_srvs/Trigger": Trigger,
}
# A slow subscriber should not lose pieces of a reply: readers keep as many as they ask for.
_STREAM = QoSProfile(depth=512)
_LOOK_S = 0.05
_DRAIN_S = 2.0
_JOIN_S = 5.0
_AUTOSTART = "Configure and activate at the start; false leaves both to a lifecycle manager."


class HearthNode(LifecycleNode):  # type: ignore[misc] # rclpy may come without types
    """The node `hearth`; its callbacks wait for nothing but by `await`.

    Parameters are read when it is configured. While it is inactive goals are rejected and prompts
    left out; services and diagnostics go on.
    """

    def __init__(self) -> None:
        super().__init__("hearth")
        self._group = ReentrantCallbackGroup()
        self._bridge: Bridge | None = None
        self.failed = False
        self._active = False
        self._goals: dict[bytes, Goal] = {}
        self._texts: dict[Topic, Any] = {}
        self._tool_clients: dict[tuple[str, str], Any] = {}
        self._made: list[Any] = []
        for one in parameters():
            # Types are judged with the values: 5 serves where 5.0 is asked.
            descriptor = ParameterDescriptor(description=one.description, dynamic_typing=True)
            self.declare_parameter(one.name, one.default, descriptor)
        self.declare_parameter("autostart", True, ParameterDescriptor(description=_AUTOSTART))

    # --- lifecycle ----------------------------------------------------------------------------

    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Read the parameters, and make topics, services and the action."""
        try:
            settings = read_settings(lambda name, _: self.get_parameter(name).value)
            self._bridge = Bridge(self, settings)
        except HearthClientError as error:
            self.get_logger().error(str(error))
            return TransitionCallbackReturn.FAILURE
        self._make_outlets()
        self._make_inlets()
        self._bridge.start()
        return super().on_configure(state)

    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Take goals and prompts from here on."""
        self._active = True
        return super().on_activate(state)

    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """End what runs."""
        self._active = False
        if self._bridge is not None:
            self._bridge.cancel_all()
        return super().on_deactivate(state)

    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Leave the daemon, and take down topics, services and the action."""
        self._take_down()
        return super().on_cleanup(state)

    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Do as for a clean-up."""
        self._take_down()
        return super().on_shutdown(state)

    def on_error(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Do as for a clean-up, so that the node can be configured again."""
        self._take_down()
        return super().on_error(state)

    def _take_down(self) -> None:
        self._active = False
        if self._bridge is not None:
            self._bridge.stop()
            self._bridge = None
        for entity in self._made:
            entity.destroy()
        for publisher in self._texts.values():
            self.destroy_lifecycle_publisher(publisher)
        for client in self._tool_clients.values():
            self.destroy_client(client)
        self._made.clear()
        self._texts.clear()
        self._tool_clients.clear()

    def _make_outlets(self) -> None:
        for topic in TOPICS:
            publisher = self.create_lifecycle_publisher(String, f"~/{topic}", _STREAM)
            self._texts[topic] = publisher
        self._diagnostics = self.create_publisher(DiagnosticArray, "/diagnostics", 10)
        self._made.append(_Made(self.destroy_publisher, self._diagnostics))

    def _make_inlets(self) -> None:
        group = {"callback_group": self._group}
        for kind, topic, callback, qos in (
            (String, "~/prompt", self._prompt, QoSProfile(depth=10)),
            (Image, "~/image", self._image, qos_profile_sensor_data),
            (CompressedImage, "~/image/compressed", self._image, qos_profile_sensor_data),
        ):
            made = self.create_subscription(kind, topic, callback, qos, **group)
            self._made.append(_Made(self.destroy_subscription, made))
        for kind, name, callback in (
            (Tokenize, "~/tokenize", self._tokenize),
            (Detokenize, "~/detokenize", self._detokenize),
            (GetMetadata, "~/metadata", self._metadata),
            (ListAdapters, "~/adapters", self._adapters),
            (Trigger, "~/health", self._health),
        ):
            made = self.create_service(kind, name, callback, **group)
            self._made.append(_Made(self.destroy_service, made))
        self._made.append(
            ActionServer(
                self,
                Generate,
                "~/generate",
                self._execute,
                goal_callback=self._may_start,
                cancel_callback=self._cancel,
                feedback_pub_qos_profile=_STREAM,
                **group,
            )
        )

    # --- topics and services ------------------------------------------------------------------

    @property
    def _now_s(self) -> float:
        return self.get_clock().now().nanoseconds * 1e-9

    def _prompt(self, message: String) -> None:
        if self._bridge is None or not self._active:
            self.get_logger().warning("a prompt came while the node is not active")
            return
        self._bridge.prompt(message.data, self._now_s)

    def _image(self, message: Image | CompressedImage) -> None:
        if self._bridge is not None:
            stamp = message.header.stamp
            self._bridge.images.offer(message, stamp.sec + stamp.nanosec * 1e-9, self._now_s)

    async def _tokenize(self, request: Any, response: Any) -> Any:
        asked = self._open_bridge.tokenize(request.text, request.messages)
        return fill(response, await self._wait(asked), ToolCall)

    async def _detokenize(self, request: Any, response: Any) -> Any:
        asked = self._open_bridge.detokenize(request.tokens)
        return fill(response, await self._wait(asked), ToolCall)

    async def _metadata(self, _: Any, response: Any) -> Any:
        return fill(response, await self._wait(self._open_bridge.metadata()), ToolCall)

    async def _adapters(self, _: Any, response: Any) -> Any:
        return fill(response, await self._wait(self._open_bridge.adapters()), ToolCall)

    async def _health(self, _: Any, response: Any) -> Any:
        return fill(response, await self._wait(self._open_bridge.health()), ToolCall)

    @property
    def _open_bridge(self) -> Bridge:
        # Services are there only between configuration and clean-up.
        assert self._bridge is not None  # noqa: S101
        return self._bridge

    async def _wait(self, asked: "ThreadFuture[Any]") -> Any:
        """Wait for the client's thread, without holding up the executor."""
        executor = self.executor
        ended = Future(executor=executor)

        def wake(_: object) -> None:
            ended.set_result(True)
            # A coroutine that waits is looked at again when the executor wakes up, and not before.
            executor.wake()

        asked.add_done_callback(wake)
        await ended
        return asked.result()

    # --- the action ---------------------------------------------------------------------------

    def _may_start(self, _: Any) -> GoalResponse:
        return GoalResponse.ACCEPT if self._active else GoalResponse.REJECT

    def _cancel(self, handle: Any) -> CancelResponse:
        goal = self._goals.get(bytes(handle.goal_id.uuid))
        if goal is not None:
            goal.cancel()
        return CancelResponse.ACCEPT

    async def _execute(self, handle: Any) -> Any:
        def feed(piece: Piece) -> None:
            handle.publish_feedback(fill(Generate.Feedback(), piece, ToolCall))

        key = bytes(handle.goal_id.uuid)
        goal = self._goals[key] = self._open_bridge.generate(handle.request, self._now_s, feed)
        try:
            if handle.is_cancel_requested:
                goal.cancel()
            outcome = await self._wait(goal.future)
            if outcome.reason == "cancelled" and handle.is_cancel_requested:
                handle.canceled()
            elif outcome.error_code or outcome.reason == "cancelled":
                handle.abort()
            else:
                handle.succeed()
        finally:
            del self._goals[key]
        return fill(Generate.Result(), outcome, ToolCall)

    # --- what the client's thread calls -------------------------------------------------------

    def publish(self, topic: Topic, text: str) -> None:
        """Publish a String."""
        self._texts[topic].publish(String(data=text))

    def publish_diagnosis(self, diagnosis: Diagnosis) -> None:
        """Publish a DiagnosticArray."""
        status = DiagnosticStatus(
            level=bytes([diagnosis.level]),
            name=f"{self.get_fully_qualified_name().lstrip('/')}: daemon",
            hardware_id="hearth",
            message=diagnosis.message,
            values=[KeyValue(key=key, value=value) for key, value in diagnosis.values.items()],
        )
        array = DiagnosticArray(status=[status])
        array.header.stamp = self.get_clock().now().to_msg()
        self._diagnostics.publish(array)

    def call_service(self, tool: ServiceTool, fields: dict[str, Any]) -> "ThreadFuture[Any]":
        """Ask a tool's service; it is asked in the executor's thread."""
        answer: ThreadFuture[Any] = ThreadFuture()
        self.executor.create_task(self._call_service, tool, fields, answer)
        return answer

    def warn(self, text: str) -> None:
        """Log a warning."""
        self.get_logger().warning(text)

    async def _call_service(
        self, tool: ServiceTool, fields: dict[str, Any], answer: "ThreadFuture[Any]"
    ) -> None:
        kind = _TOOL_TYPES[tool.service_type]
        key = (tool.service, tool.service_type)
        if key not in self._tool_clients:
            made = self.create_client(kind, tool.service, callback_group=self._group)
            self._tool_clients[key] = made
        client = self._tool_clients[key]
        while not client.service_is_ready():
            if answer.cancelled() or self._bridge is None:
                return
            await self._pause(_LOOK_S)
        asked = client.call_async(kind.Request(**fields))
        answer.add_done_callback(lambda one: asked.cancel() if one.cancelled() else None)
        await asked
        if answer.cancelled():
            client.remove_pending_request(asked)
        with suppress(InvalidStateError):
            answer.set_result(asked.result())

    async def _pause(self, seconds: float) -> None:
        over = Future(executor=self.executor)
        timer = self.create_timer(
            seconds, lambda: over.set_result(True), callback_group=self._group
        )
        await over
        self.destroy_timer(timer)

    # --- start and end ------------------------------------------------------------------------

    def begin(self) -> None:
        """Configure and activate the node, unless that is left to others; ends a failed one."""
        if not self.get_parameter("autostart").value:
            return
        for change in (self.trigger_configure, self.trigger_activate):
            if change() != TransitionCallbackReturn.SUCCESS:
                self.failed = True
                os.kill(os.getpid(), signal.SIGTERM)
                return

    async def end(self, done: "ThreadFuture[None]") -> None:
        """End goals, tell their clients, and leave the daemon."""
        if self._active:
            self.trigger_deactivate()
        deadline = time.monotonic() + _DRAIN_S
        while self._goals and time.monotonic() < deadline:
            await self._pause(_LOOK_S)
        # Results are sent by tasks of their own.
        await self._pause(_LOOK_S)
        if not self.failed:
            self.trigger_shutdown()
        done.set_result(None)


class _Made:
    """An entity that its node has to destroy."""

    def __init__(self, destroy: Any, entity: Any) -> None:
        self.destroy = lambda: destroy(entity)


def main() -> None:
    """Run the node until SIGTERM or SIGINT; exits with 1 where it could not start."""
    ends = {signal.SIGTERM, signal.SIGINT}
    # Before there are other threads: only the wait below takes them.
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    rclpy.init(signal_handler_options=SignalHandlerOptions.NO)
    node = HearthNode()
    executor = SingleThreadedExecutor()
    executor.add_node(node)

    def spin() -> None:
        try:
            executor.spin()
        except (ShutdownException, ExternalShutdownException):
            return
        except BaseException:
            node.failed = True
            os.kill(os.getpid(), signal.SIGTERM)
            raise

    thread = Thread(target=spin, name="executor")
    thread.start()
    executor.create_task(node.begin)
    signal.sigwait(ends)
    done: ThreadFuture[None] = ThreadFuture()
    if thread.is_alive():
        executor.create_task(node.end, done)
        done.result(_JOIN_S)
    executor.shutdown()
    thread.join(_JOIN_S)
    node.destroy_node()
    rclpy.shutdown()
    sys.exit(node.failed)


if __name__ == "__main__":
    main()
