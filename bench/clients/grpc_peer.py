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

from hearth.bench.clients.measure import PROMPT, SIDE, TOKENS, MeasuredSession, print_figures
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


async def _connect() -> MeasuredSession:
    aio = "--asyncio" in sys.argv
    connect = grpc.aio.insecure_channel if aio else grpc.insecure_channel
    channel: Any = connect(f"unix:{sys.argv[-1]}", options=_OPTIONS)
    codec = {"request_serializer": _ENCODE, "response_deserializer": _DECODE_ANSWER}
    ask = channel.unary_unary(f"/{_SERVICE}/Status", **codec)
    generate = channel.unary_stream(f"/{_SERVICE}/Generate", **codec)

    async def status() -> None:
        answer = ask(_Call(Status(id="1")))
        if aio:
            await answer

    async def read(call: _Call) -> int:
        """Number of all answers."""
        if not aio:
            return sum(1 for _ in generate(call))
        count = 0
        async for _ in generate(call):
            count += 1
        return count

    async def stream() -> int:
        call = _Call(Generate(id="1", prompt=PROMPT, max_tokens=TOKENS, ignore_eos=True))
        # All but `accepted` and `done`.
        return await read(call) - 2

    async def picture(pixels: bytes) -> None:
        part = ImagePart(frame=1, encoding="rgba8", width=SIDE, height=SIDE)
        turns = [Message(role="user", content=[part])]
        await read(_Call(Generate(id="1", messages=turns, max_tokens=1), pixels))

    async def close() -> None:
        closed = channel.close()
        if aio:
            await closed

    return MeasuredSession(status, stream, picture, close)


if __name__ == "__main__":
    print_figures(_connect)
