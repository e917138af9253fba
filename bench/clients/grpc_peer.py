"""gRPC in place of ZeroMQ: the answers of the scripted daemon to a client of `grpcio`.

`python -m hearth.bench.clients.grpc_peer [--asyncio] ADDRESS` is the bench of
that client. Messages are msgpack as Hearth has them, which costs less than protobuf.
"""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import msgspec

from hearth.bench.clients.measure import SIDE, MeasuredSession, print_figures
from hearth.bench.clients.scripted_daemon import answers
from hearth_client.protocol import (
    Answer,
    ClientMessage,
    Generate,
    ImagePart,
    Message,
    ServerMessage,
    Status,
)

_SERVICE = "hearth.Bench"
_THREADS = 4
_OPTIONS = [("grpc.max_receive_message_length", 16 << 20), ("grpc.use_local_subchannel_pool", 1)]


class _Call(msgspec.Struct):
    """A request and its pixels, as a message of protobuf has both."""

    request: ClientMessage
    pixels: bytes = b""


_ENCODE = msgspec.msgpack.Encoder().encode
_DECODE_CALL = msgspec.msgpack.Decoder(_Call).decode
_DECODE_ANSWER = msgspec.msgpack.Decoder(ServerMessage).decode


@contextmanager
def grpc_server(socket: Path) -> Iterator[None]:
    """Serve at the path `socket` by threads of this process."""

    def stream(call: _Call, _: grpc.ServicerContext) -> Iterator[Answer]:
        return answers(call.request)

    def unary(call: _Call, _: grpc.ServicerContext) -> Answer:
        return next(answers(call.request))

    codec = {"request_deserializer": _DECODE_CALL, "response_serializer": _ENCODE}
    handlers = {
        "Status": grpc.unary_unary_rpc_method_handler(unary, **codec),
        "Generate": grpc.unary_stream_rpc_method_handler(stream, **codec),
    }
    server = grpc.server(ThreadPoolExecutor(_THREADS), options=_OPTIONS)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(_SERVICE, handlers)])
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    try:
        yield
    finally:
        server.stop(None).wait()


class _Stub(MeasuredSession):
    """The two methods of the service on a channel."""

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        codec = {"request_serializer": _ENCODE, "response_deserializer": _DECODE_ANSWER}
        self.ask = channel.unary_unary(f"/{_SERVICE}/Status", **codec)
        self.generate = channel.unary_stream(f"/{_SERVICE}/Generate", **codec)

    async def picture(self, pixels: bytes) -> None:
        """See the base."""
        part = ImagePart(frame=1, encoding="rgba8", width=SIDE, height=SIDE)
        turns = [Message(role="user", content=[part])]
        await self.read(_Call(Generate(id="1", messages=turns, max_tokens=1), pixels))

    async def stream(self, max_tokens: int) -> int:
        """See the base."""
        prompt = "Once upon a time"
        call = _Call(Generate(id="1", prompt=prompt, max_tokens=max_tokens, ignore_eos=True))
        # All but `accepted` and `done`.
        return await self.read(call) - 2

    async def read(self, call: _Call) -> int:
        """Read all answers to a call; their number."""
        raise NotImplementedError


class _Blocking(_Stub):
    async def status(self) -> None:
        self.ask(_Call(Status(id="1")))

    async def read(self, call: _Call) -> int:
        return sum(1 for _ in self.generate(call))

    async def close(self) -> None:
        self.channel.close()


class _Asyncio(_Stub):
    async def status(self) -> None:
        await self.ask(_Call(Status(id="1")))

    async def read(self, call: _Call) -> int:
        count = 0
        async for _ in self.generate(call):
            count += 1
        return count

    async def close(self) -> None:
        await self.channel.close()


async def _connect() -> MeasuredSession:
    address = f"unix:{sys.argv[-1]}"
    if "--asyncio" in sys.argv:
        return _Asyncio(grpc.aio.insecure_channel(address, options=_OPTIONS))
    return _Blocking(grpc.insecure_channel(address, options=_OPTIONS))


if __name__ == "__main__":
    print_figures(_connect)
