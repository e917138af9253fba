"""All between a ROS node and the daemon, in a thread of its own."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future, TimeoutError  # noqa: A004 - of its own before 3.11
from contextlib import suppress
from threading import Thread
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from hearth_client import (
    AsyncClient,
    ClientClosed,
    ConnectionTimeout,
    HearthClientError,
    ImageInvalid,
    InvalidValue,
    StatusReport,
)
from hearth_ros.images import LatestImage, picture_of
from hearth_ros.prompts import Prompts, Topic
from hearth_ros.requests import (
    Ask,
    ServiceTool,
    Turn,
    ask_of,
    options_of,
    read_tools,
    turns_of,
    with_picture,
)
from hearth_ros.settings import Settings
from hearth_ros.talk import Outcome, Piece, Talk

OK, WARN, ERROR = 0, 1, 2
"""Levels of diagnostics."""
_STOP_S = 3.0
T = TypeVar("T")
Fields = dict[str, Any]
"""Fields of a service's response by name."""


class Diagnosis(NamedTuple):
    """One DiagnosticStatus."""

    level: int
    message: str
    values: dict[str, str]


class Node(Protocol):
    """A ROS node as the bridge uses it, in the client's thread; nothing here may wait."""

    def publish(self, topic: Topic, text: str) -> None:
        """Publish a String."""

    def publish_diagnosis(self, diagnosis: Diagnosis) -> None:
        """Publish a DiagnosticArray."""

    def call_service(self, tool: ServiceTool, fields: Fields) -> "Future[Any]":
        """Ask a tool's service."""

    def warn(self, text: str) -> None:
        """Log a warning."""


class Goal(NamedTuple):
    """A goal that runs: `future` has its outcome, also after an error or `cancel`."""

    future: "Future[Outcome]"
    cancel: Callable[[], None]


class Bridge:
    """The daemon's client in a thread with a loop; methods return at once but for `stop`.

    A daemon that is away is looked for with each request, so the node may start before it. Raises
    InvalidValue and UnsupportedOption for settings that are wrong.
    """

    def __init__(self, node: Node, settings: Settings) -> None:
        self.images = LatestImage(settings.image_rate_hz, settings.late_frame_s)
        self._node = node
        self._settings = settings
        self._client = AsyncClient(
            settings.address or None, timeout=settings.connect_timeout_s, name="hearth-ros"
        )
        self._prompts = Prompts(settings, _standing_ask(settings), self._answer, node.publish)
        self._talks: set[Talk] = set()
        self._prompted: Talk | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._run, name="hearth", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()
        self._keep(self._prompts.serve())
        if self._settings.diagnostics_period_s:
            self._keep(self._diagnose())

    def stop(self) -> None:
        """End all that runs and close the session; takes some seconds at most."""
        try:
            asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(_STOP_S)
        except TimeoutError:
            self._node.warn("the session with the daemon could not be closed in time")
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_S)

    def cancel_all(self) -> None:
        """End all goals and prompts; the session stays open."""
        self._loop.call_soon_threadsafe(self._cancel_all)

    def prompt(self, text: str, now_s: float) -> None:
        """Answer a prompt of the topic, with the newest picture where one has come."""
        try:
            turn = self._pictured({"role": "user", "content": text}, now_s)
        except HearthClientError as error:
            self._loop.call_soon_threadsafe(self._prompts.report, error)
            return
        if self._settings.interrupt:
            self._loop.call_soon_threadsafe(self._interrupt)
        self._loop.call_soon_threadsafe(self._prompts.put, text, turn)

    def generate(self, message: Any, now_s: float, on_piece: Callable[[Piece], None]) -> Goal:
        """Run a Generate goal; `on_piece` is called in the client's thread."""
        try:
            ask = ask_of(message)
            if message.latest_image:
                ask = self._seeing(ask, now_s)
        except HearthClientError as error:
            refused: Future[Outcome] = Future()
            refused.set_result(Outcome.of(error))
            return Goal(refused, lambda: None)
        talk = self._talk(ask, on_piece)
        future = asyncio.run_coroutine_threadsafe(self._finish(talk), self._loop)
        return Goal(future, lambda: self._cancel(talk))

    def tokenize(self, text: str, messages: Iterable[Any]) -> "Future[Fields]":
        """Fields of the Tokenize response."""

        async def ask() -> Fields:
            turns = turns_of(messages)
            # Both are refused by the daemon, and an empty text alone is none.
            given = text if text or not turns else None
            return {"tokens": await self._client.tokenize(given, messages=turns or None)}

        return self._ask(ask)

    def detokenize(self, tokens: Iterable[int]) -> "Future[Fields]":
        """Fields of the Detokenize response."""

        async def ask() -> Fields:
            return {"text": await self._client.detokenize([int(one) for one in tokens])}

        return self._ask(ask)

    def metadata(self) -> "Future[Fields]":
        """Fields of the GetMetadata response."""

        async def ask() -> Fields:
            welcome = await self._client.connect()
            names = ("server", "model", "tool_format", "epoch", "features")
            limits = msgspec.json.encode(welcome.limits).decode()
            return {name: getattr(welcome, name) for name in names} | {"limits": limits}

        return self._ask(ask)

    def adapters(self) -> "Future[Fields]":
        """Fields of the ListAdapters response."""

        async def ask() -> Fields:
            return {"adapters": (await self._client.status()).adapters}

        return self._ask(ask)

    def health(self) -> "Future[Fields]":
        """Fields of the Trigger response: success where the daemon is ready."""

        async def ask() -> Fields:
            found = await self._diagnosis()
            return {"success": found.level == OK, "message": found.message}

        return asyncio.run_coroutine_threadsafe(ask(), self._loop)

    # --- in the client's thread ---------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _keep(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run it until the end, and tell where it fails before that."""

        def ended(future: "Future[None]") -> None:
            if not future.cancelled() and (error := future.exception()) is not None:
                self._node.warn(f"a part of the node has ended: {error!r}")

        asyncio.run_coroutine_threadsafe(coroutine, self._loop).add_done_callback(ended)

    async def _stop(self) -> None:
        self._cancel_all()
        # The daemon ends a cancelled reply at once, so that goals get an outcome that says so.
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._idle.wait(), _STOP_S / 3)
        running = asyncio.all_tasks() - {asyncio.current_task()}
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._client.close()

    def _cancel_all(self) -> None:
        self._prompts.clear()
        for talk in list(self._talks):
            talk.cancel()

    def _cancel(self, talk: Talk) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(talk.cancel)

    def _ask(self, ask: Callable[[], Awaitable[Fields]]) -> "Future[Fields]":
        """Fields of a response, with error_code and error_message where it failed."""

        async def answer() -> Fields:
            error: HearthClientError
            try:
                return await asyncio.wait_for(ask(), self._settings.request_timeout_s)
            except HearthClientError as failed:
                error = failed
            except asyncio.TimeoutError:
                error = ConnectionTimeout("the daemon has not answered in time")
            except asyncio.CancelledError:
                error = ClientClosed("the node stops")
            return {"error_code": error.code, "error_message": error.message}

        return asyncio.run_coroutine_threadsafe(answer(), self._loop)

    async def _finish(self, talk: Talk) -> Outcome:
        """Run a goal's talk; one that the stop cuts off fails as closed."""
        try:
            return await self._run_talk(talk)
        except asyncio.CancelledError:
            return Outcome.of(ClientClosed("the node stops"))

    async def _answer(
        self, ask: Ask, on_piece: Callable[[Piece], None]
    ) -> tuple[Outcome, list[Turn]]:
        self._prompted = talk = self._talk(ask, on_piece)
        try:
            return await self._run_talk(talk), talk.turns
        finally:
            self._prompted = None

    def _talk(self, ask: Ask, on_piece: Callable[[Piece], None]) -> Talk:
        return Talk(
            ask,
            self._node.call_service,
            on_piece,
            self._node.warn,
            max_rounds=self._settings.max_rounds,
            tool_timeout_s=self._settings.tool_timeout_s,
        )

    async def _run_talk(self, talk: Talk) -> Outcome:
        self._talks.add(talk)
        self._idle.clear()
        try:
            return await talk.run(self._client)
        finally:
            self._talks.discard(talk)
            if not self._talks:
                self._idle.set()

    def _interrupt(self) -> None:
        self._prompts.clear()
        if self._prompted is not None:
            self._prompted.cancel()

    async def _diagnose(self) -> None:
        while True:
            self._node.publish_diagnosis(await self._diagnosis())
            await asyncio.sleep(self._settings.diagnostics_period_s)

    async def _diagnosis(self) -> Diagnosis:
        images = self.images
        values = {
            "replies": len(self._talks),
            "pictures taken": images.taken,
            "pictures left out": images.left_out,
            "pictures late": images.late,
        }
        try:
            status = await asyncio.wait_for(self._client.status(), self._settings.request_timeout_s)
        except asyncio.TimeoutError:
            found = ERROR, "the daemon has not answered in time"
        except HearthClientError as error:
            found = ERROR, error.message
        else:
            found = _judged(status)
            names = (
                "server",
                "model",
                "state",
                "uptime_s",
                "clients",
                "running",
                "queued",
                "places",
            )
            values |= {name: getattr(status, name) for name in names}
        return Diagnosis(*found, {name: str(value) for name, value in values.items()})

    # --- pictures, in the node's threads ------------------------------------------------------

    def _pictured(self, turn: Turn, now_s: float, *, required: bool = False) -> Turn:
        message, age_s = self.images.latest(now_s)
        if message is None:
            if required:
                raise ImageInvalid("no picture has come yet", "latest_image")
            return turn
        if age_s is not None:
            self._node.warn(f"the newest picture is {age_s:.1f} s old")
        return with_picture(turn, picture_of(message))

    def _seeing(self, ask: Ask, now_s: float) -> Ask:
        if not ask.turns:
            raise InvalidValue("a raw prompt takes no picture", "latest_image")
        last = self._pictured(ask.turns[-1], now_s, required=True)
        return ask._replace(turns=[*ask.turns[:-1], last])


def _standing_ask(settings: Settings) -> Ask:
    """System turn, tools and options that every prompt of the topic is asked with."""
    tools = read_tools(settings.tools_file)
    for one in tools:
        if not one.service:
            text = f"{one.tool.name} has no service, which tools of prompts need"
            raise InvalidValue(text, "tools_file")
    turns: list[Turn] = []
    if settings.system_prompt:
        turns.append({"role": "system", "content": settings.system_prompt})
    return Ask(None, turns, tools, options_of(settings))


def _judged(status: StatusReport) -> tuple[int, str]:
    if status.state == "ready":
        return OK, f"{status.model} is ready"
    stage = f" ({status.stage})" if status.stage else ""
    reason = f": {status.reason}" if status.reason else ""
    level = ERROR if status.state == "failed" else WARN
    return level, f"the daemon is {status.state}{stage}{reason}"
