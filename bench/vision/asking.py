"""Questions about pictures through a daemon, one at a time, and where their time goes."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

import msgspec
from hearth_client import Client, Image

from daemon.control.client import ask
from daemon.control.messages import Trace, TraceReport
from daemon.own_daemon import OwnDaemon
from runtime.errors import HearthError

QUESTION = "What colour is the circle?"


class Asked(msgspec.Struct, kw_only=True):
    """One question; seconds, `ttft` at the client and the others as the daemon's trace has them.

    `hand_over` is what of the time until the embeddings were there no stage took: messages, and
    what waits for them.
    """

    ttft: float
    tokenize: float
    decode: float
    resize: float
    engine: float
    hand_over: float
    queue: float
    prefill: float
    token: int
    tokens: int
    cached: bool

    @property
    def ready(self) -> float:
        """From the receipt of the last frame until the embeddings were there."""
        return self.tokenize + self.encode

    @property
    def encode(self) -> float:
        """From the tokens of the prompt until the embeddings were there."""
        return self.decode + self.resize + self.engine + self.hand_over


class Asker:
    """Asks one daemon about pictures."""

    def __init__(self, daemon: OwnDaemon, client: Client) -> None:
        self._daemon = daemon
        self._client = client

    def ask(self, data: bytes) -> Asked:
        """Ask about the picture of a file and wait for one token."""
        started = monotonic()
        turn = {"role": "user", "content": [Image(data), QUESTION]}
        reply = self._client.generate(messages=[turn], max_tokens=1, temperature=0)
        next(iter(reply))
        ttft = monotonic() - started
        reply.text()
        (ended,) = ask(Trace(last=1), TraceReport, str(self._daemon.socket)).requests
        if (images := ended.images) is None:
            raise HearthError("internal", "the daemon tells nothing of a picture")
        stages = [one / 1000 for one in (images.decode_ms, images.resize_ms, images.engine_ms)]
        return Asked(
            ttft=ttft,
            tokenize=ended.tokenize_s,
            decode=stages[0],
            resize=stages[1],
            engine=stages[2],
            hand_over=max(0.0, ended.images_s - sum(stages)),
            queue=ended.queue_s,
            prefill=ended.prefill_s,
            token=reply.tokens[0],
            tokens=images.tokens,
            cached=bool(images.cached),
        )


@contextmanager
def asker(daemon: OwnDaemon) -> Iterator[Asker]:
    """An asker with a connection of its own."""
    with Client(daemon.socket, timeout=60) as client:
        yield Asker(daemon, client)
