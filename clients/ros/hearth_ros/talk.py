"""One goal or prompt: replies of the model, and between them tools that ROS services answer."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec

from hearth_client import (
    AsyncClient,
    AsyncGeneration,
    Done,
    HearthClientError,
    Message,
    Reply,
    ReplyEmpty,
    ToolCall,
)
from hearth_ros.requests import Ask, ServiceTool

M = TypeVar("M")
CallService = Callable[[ServiceTool, dict[str, Any]], "Future[Any]"]
"""Ask a tool's service: fields of its request by name; the response has `success` and a text."""


class Call(msgspec.Struct, frozen=True):
    """A call of a tool, with the fields of ToolCall.msg; `arguments` is JSON."""

    id: str
    name: str
    arguments: str


def fill(
    message: M, fields: Mapping[str, Any] | msgspec.Struct, call_type: Callable[..., Any]
) -> M:
    """Set fields of a ROS message by their names; calls become messages of `call_type`."""
    if isinstance(fields, msgspec.Struct):
        fields = {name: getattr(fields, name) for name in fields.__struct_fields__}
    for name, value in fields.items():
        if name == "tool_calls":
            calls = [call_type(id=one.id, name=one.name, arguments=one.arguments) for one in value]
            setattr(message, name, calls)
        else:
            setattr(message, name, value)
    return message


class Piece(msgspec.Struct, kw_only=True):
    """More of a reply, with the fields of the action's feedback."""

    seq: int
    round: int
    text: str = ""
    reasoning: str = ""
    tokens: list[int] = []
    tool_calls: list[Call] = []


class Outcome(msgspec.Struct, kw_only=True):
    """End of a goal, with the fields of the action's result."""

    text: str = ""
    reasoning: str = ""
    tool_calls: list[Call] = []
    reason: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    rounds: int = 0
    request: str = ""
    error_code: str = ""
    error_message: str = ""
    error_field: str = ""
    retry_after_s: float = 0.0

    @classmethod
    def of(cls, error: HearthClientError) -> "Outcome":
        """Return the outcome of what failed before it began."""
        outcome = cls()
        outcome.fail(error)
        return outcome

    def fail(self, error: HearthClientError) -> None:
        """Take over an error."""
        self.reason = ""
        self.error_code, self.error_message = error.code, error.message
        self.error_field, self.retry_after_s = error.field, error.retry_after_s or 0.0


class Talk:
    """One run of an Ask, in a task of the client's loop; `turns` grow by what was said."""

    def __init__(
        self,
        ask: Ask,
        call_service: CallService,
        on_piece: Callable[[Piece], None],
        warn: Callable[[str], None],
        *,
        max_rounds: int,
        tool_timeout_s: float,
    ) -> None:
        self.turns = list(ask.turns)
        self._ask = ask
        self._tools = {one.tool.name: one for one in ask.tools}
        self._call_service = call_service
        self._on_piece = on_piece
        self._warn = warn
        self._max_rounds = max_rounds
        self._tool_timeout_s = tool_timeout_s
        self._outcome = Outcome()
        self._seq = 0
        self._cancel_asked = asyncio.Event()
        self._generation: AsyncGeneration | None = None
        self._task: asyncio.Task[Any] | None = None

    async def run(self, client: AsyncClient) -> Outcome:
        """Ask, call tools and ask again until the reply has no call that a service answers."""
        self._task = asyncio.current_task()
        outcome = self._outcome
        if self._cancel_asked.is_set():
            outcome.reason = "cancelled"
            return outcome
        try:
            options = dict(self._ask.options)
            while await self._reply(client, options):
                # Forced again, it would call for ever.
                if options.get("tool_choice", "none") != "none":
                    options["tool_choice"] = "auto"
        except asyncio.CancelledError:
            if not self._cancel_asked.is_set():
                raise
            outcome.reason = "cancelled"
        except HearthClientError as error:
            outcome.text = error.text or outcome.text
            outcome.fail(error)
        return outcome

    def cancel(self) -> None:
        """End it, from within the loop: the outcome has what came until then."""
        self._cancel_asked.set()
        if self._generation is not None:
            self._generation.cancel()
        elif self._task is not None:
            self._task.cancel()

    async def _reply(self, client: AsyncClient, options: dict[str, Any]) -> bool:
        """Read one reply and have its calls answered; False if it is the last one."""
        outcome = self._outcome
        outcome.rounds += 1
        if self._ask.tools:
            options["tools"] = [one.tool for one in self._ask.tools]
        turns = None if self._ask.prompt is not None else self.turns
        generation = await client.generate(self._ask.prompt, messages=turns, **options)
        self._generation = generation
        try:
            done = await self._read(generation)
        finally:
            self._generation = None
        (reply,) = generation.choices
        calls = [_call(one) for one in reply.tool_calls]
        self._finish(generation, reply, done, calls)
        if done.reason == "cancelled" or not self._answerable(calls):
            return False
        if outcome.rounds == self._max_rounds:
            self._warn(f"the model still calls tools after {outcome.rounds} replies")
            return False
        self._emit(tool_calls=calls)
        outcome.tool_calls = []
        for call in calls:
            await self._answer(call)
        return True

    async def _read(self, generation: AsyncGeneration) -> Done:
        if self._cancel_asked.is_set():
            generation.cancel()
        async for delta in generation:
            if delta.text or delta.reasoning or delta.tokens:
                self._emit(text=delta.text, reasoning=delta.reasoning, tokens=delta.tokens)
        return await generation.result()

    def _finish(
        self, generation: AsyncGeneration, reply: Reply, done: Done, calls: Sequence[Call]
    ) -> None:
        outcome = self._outcome
        outcome.text, outcome.reasoning = reply.text, reply.reasoning
        outcome.tool_calls, outcome.reason = list(calls), done.reason
        outcome.prompt_tokens += done.usage.prompt_tokens
        outcome.completion_tokens += done.usage.completion_tokens
        outcome.request = generation.request
        try:
            self.turns.append(reply.message())
        except ReplyEmpty:
            # A reply that ended before its first word is no turn, and no failure.
            return

    def _answerable(self, calls: Sequence[Call]) -> bool:
        """True if there are calls, and a service for each."""
        return bool(calls) and all(
            one.name in self._tools and self._tools[one.name].service for one in calls
        )

    async def _answer(self, call: Call) -> None:
        content = await self._content(self._tools[call.name], call)
        self.turns.append(Message(role="tool", tool_call_id=call.id, content=content))

    async def _content(self, tool: ServiceTool, call: Call) -> str:
        """Ask the service; what goes wrong is told to the model, and to people by a warning."""
        fields = service_fields(tool.service_type, call)
        if fields is None:
            self._warn(f"{tool.service} takes no such arguments: {call.arguments}")
            return _error("the arguments are wrong")
        try:
            asked = asyncio.wrap_future(self._call_service(tool, fields))
            response = await asyncio.wait_for(asked, self._tool_timeout_s)
        except asyncio.TimeoutError:
            self._warn(f"{tool.service} has not answered within {self._tool_timeout_s:g} s")
            return _error("no answer in time")
        except Exception as error:  # noqa: BLE001 - of whatever kind a service's code raises
            self._warn(f"{tool.service} failed: {error}")
            return _error("the tool failed")
        text = response.content if hasattr(response, "content") else response.message
        if response.success:
            return text or '{"ok":true}'
        return _error(text or "the tool failed")

    def _emit(self, **fields: Any) -> None:
        self._on_piece(Piece(seq=self._seq, round=self._outcome.rounds - 1, **fields))
        self._seq += 1


def service_fields(service_type: str, call: Call) -> dict[str, Any] | None:
    """Fields of a tool's service request; None where the type has no place for the arguments.

    std_srvs/SetBool takes the one argument, which is true or false; std_srvs/Trigger takes none.
    """
    if service_type == "hearth_msgs/CallTool":
        return {"id": call.id, "name": call.name, "arguments": call.arguments}
    arguments = list(msgspec.json.decode(call.arguments, type=dict[str, Any]).values())
    if service_type == "std_srvs/Trigger":
        return None if arguments else {}
    if len(arguments) != 1 or not isinstance(arguments[0], bool):
        return None
    return {"data": arguments[0]}


def _call(call: ToolCall) -> Call:
    return Call(call.id, call.name, msgspec.json.encode(call.arguments).decode())


def _error(text: str) -> str:
    return msgspec.json.encode({"error": text}).decode()
