"""Driver of ../conformance: commands on standard input, events on standard output."""

import asyncio
import base64
import json
import sys
from collections.abc import Awaitable, Mapping
from typing import Any

import msgspec

from hearth_client import (
    FEATURES,
    AsyncClient,
    AsyncGeneration,
    ConnectionFailed,
    HearthClientError,
    Image,
    RequestRefused,
    ServiceFailed,
    Video,
)

ALL = (*FEATURES, "token_bytes")


def tell(event: str, name: str | None = None, fields: object = None) -> None:
    """Write one event; binary is base64 in it."""
    about = {} if name is None else {"as": name}
    told = {"event": event, **about, **(msgspec.to_builtins(fields) if fields is not None else {})}
    for key in ("t", "id", "seq"):
        told.pop(key, None)
    print(json.dumps(told), flush=True)


def kind_of(error: HearthClientError) -> str:
    """The family of an error."""
    for family, name in (
        (RequestRefused, "request"),
        (ServiceFailed, "service"),
        (ConnectionFailed, "connection"),
    ):
        if isinstance(error, family):
            return name
    return "client"


def fail(error: HearthClientError, name: str | None = None) -> None:
    """Write `failed`."""
    fields: dict[str, Any] = {"code": error.code, "message": error.message, "kind": kind_of(error)}
    for key in ("field", "retry_after_s", "usage"):
        if (value := getattr(error, key)) not in (None, ""):
            fields[key] = value
    tell("failed", name, fields)


def picture(told: Mapping[str, Any]) -> Image:
    """A picture of a command."""
    data = base64.b64decode(told["data"])
    if "encoding" not in told:
        return Image(data)
    return Image(
        data,
        told["encoding"],
        width=told.get("width"),
        height=told.get("height"),
        step=told.get("step"),
    )


def part(told: Mapping[str, Any]) -> str | Image | Video:
    """A part of a turn."""
    if told["type"] == "text":
        return str(told["text"])
    if told["type"] == "image":
        return picture(told)
    frames = told["frames"]
    return Video([picture(one) for one in frames], [one["time_s"] for one in frames])


def arguments(request: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of `generate` and `tokenize`."""
    found = dict(request)
    turns = found.get("messages")
    if turns is not None:
        found["messages"] = [
            {**turn, "content": [part(one) for one in turn["content"]]}
            if isinstance(turn.get("content"), list)
            else turn
            for turn in turns
        ]
    return found


class Driver:
    """The client of one run, and its requests by the suite's names."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._client: AsyncClient | None = None
        self._generations: dict[str, AsyncGeneration] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Take commands until `close` or the end of the input."""
        reader = asyncio.StreamReader(limit=1 << 28)
        protocol = asyncio.StreamReaderProtocol(reader)
        await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin.buffer)
        while line := await reader.readline():
            command = json.loads(line)
            if command["do"] == "close":
                break
            await self._take(command["do"], command.get("as", ""), command)
        if self._client is not None:
            await self._client.close()
        await asyncio.gather(*self._tasks)
        tell("closed")

    async def _take(self, what: str, name: str, command: Mapping[str, Any]) -> None:
        if what == "connect":
            await self._connect(command)
        elif what == "generate":
            self._spawn(name, self._generate(name, command))
        elif what == "read":
            self._spawn(name, self._read(name))
        elif what == "cancel":
            if name in self._generations:
                self._generations[name].cancel()
        else:
            self._spawn(name, self._ask(what, name, command.get("request", {})))
        # What was asked goes out before the next command is read.
        await asyncio.sleep(0)

    def _spawn(self, name: str, work: Awaitable[None]) -> None:
        async def watched() -> None:
            try:
                await work
            except HearthClientError as error:
                fail(error, name)

        task = asyncio.create_task(watched())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, command: Mapping[str, Any]) -> None:
        if self._client is not None:
            await self._client.close()
        self._client = AsyncClient(
            self._address,
            timeout=command.get("timeout_s"),
            silence_s=command.get("silence_s", 60.0),
            lease_s=command.get("lease_s"),
            name=command.get("name", "driver-python"),
            features=command.get("features", ALL),
        )
        try:
            tell("connected", None, {"welcome": await self._client.connect()})
        except HearthClientError as error:
            fail(error)

    def _connected(self) -> AsyncClient:
        if self._client is None:
            self._client = AsyncClient(self._address)
        return self._client

    async def _generate(self, name: str, command: Mapping[str, Any]) -> None:
        generation = await self._connected().generate(**arguments(command["request"]))
        self._generations[name] = generation
        if command.get("read", True):
            await self._read(name)

    async def _read(self, name: str) -> None:
        generation = self._generations[name]
        told = False
        async for delta in generation:
            if not told and generation.accepted is not None:
                tell("accepted", name, {"prompt_tokens": generation.accepted.prompt_tokens})
                told = True
            tell("delta", name, delta)
        tell("done", name, generation.done)

    async def _ask(self, what: str, name: str, request: Mapping[str, Any]) -> None:
        client = self._connected()
        if what == "tokenize":
            tell("tokens", name, {"tokens": await client.tokenize(**arguments(request))})
        elif what == "detokenize":
            tell("text", name, {"text": await client.detokenize(**request)})
        else:
            tell("status_report", name, await client.status())


if __name__ == "__main__":
    asyncio.run(Driver(sys.argv[1]).run())
