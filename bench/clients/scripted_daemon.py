"""A daemon that answers at once and computes nothing: what a client costs is what is left."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import msgspec
import zmq

from hearth.runtime.errors import HearthError
from hearth_client.protocol import (
    Accepted,
    Answer,
    Bye,
    Cancel,
    ClientMessage,
    Delta,
    Done,
    Generate,
    Hello,
    Lease,
    Leased,
    Limits,
    Status,
    StatusReport,
    Usage,
    Welcome,
)

_LEASE_S = 30.0
_WORD = " word"
_PROMPT_TOKENS = 12
_LIMITS = Limits(
    frame_bytes=1 << 20,
    frames=9,
    requests_per_client=64,
    prompt_tokens=2000,
    total_tokens=2048,
    queued_requests=256,
    queued_tokens=65536,
    lease_s=_LEASE_S,
    images=8,
    image_bytes=8 << 20,
    request_image_bytes=32 << 20,
    image_tokens=256,
)
_TOTALS = ("requests", "done", "cancelled", "failed", "prompt_tokens", "completion_tokens")
_FEATURES = ["images", "reasoning", "tool_calls", "end_details"]


def answers(request: ClientMessage) -> Iterator[Answer]:
    """All answers to a message: those of a generation have one token a delta."""
    match request:
        case Hello():
            yield Welcome(
                proto=1,
                server="scripted",
                limits=_LIMITS,
                features=_FEATURES,
                model="scripted",
                epoch="0123456789abcdef",
            )
        case Lease():
            yield Leased(seconds=_LEASE_S)
        case Status():
            yield StatusReport(
                id=request.id,
                server="scripted",
                model="scripted",
                state="ready",
                uptime_s=1.0,
                clients=1,
                running=0,
                queued=0,
                queued_tokens=0,
                places=8,
                totals=dict.fromkeys(_TOTALS, 1000),
            )
        case Generate():
            tokens = request.max_tokens or 1
            yield Accepted(id=request.id, prompt_tokens=_PROMPT_TOKENS, request="0123456789abcdef")
            for seq in range(tokens):
                yield Delta(id=request.id, seq=seq, text=_WORD, tokens=[1000 + seq])
            usage = Usage(
                prompt_tokens=_PROMPT_TOKENS,
                completion_tokens=tokens,
                decode_ms=1.5,
            )
            yield Done(id=request.id, reason="length", usage=usage)
        case Bye() | Cancel():
            pass
        case _:
            raise HearthError("internal", f"the bench has no answer to {type(request).__name__}")


@contextmanager
def scripted_daemon(socket: Path) -> Iterator[None]:
    """Serve at the path `socket` by a thread of this process, which does nothing else meanwhile."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    router.setsockopt(zmq.SNDHWM, 0)
    router.bind(f"ipc://{socket}")
    thread = Thread(target=_serve, args=(router,))
    thread.start()
    try:
        yield
    finally:
        # Ends the thread's wait, and returns when it has closed its socket.
        context.term()
        thread.join()


def _serve(router: zmq.Socket[bytes]) -> None:
    decoder = msgspec.msgpack.Decoder(ClientMessage)
    encoder = msgspec.msgpack.Encoder()
    with router:
        while True:
            try:
                routing_id, data, *_ = router.recv_multipart()
            except zmq.ContextTerminated:
                return
            for answer in answers(decoder.decode(data)):
                router.send_multipart((routing_id, encoder.encode(answer)))
