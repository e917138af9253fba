"""Conversion of long texts in a worker thread, and the text of a stream of tokens."""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import anyio.to_thread
import pytest

from hearth.actors.messages import Cancel, Convert, Converted, Failed, Request
from hearth.actors.tokenizer import actor as module
from hearth.runtime.text.conversation import Conversation, Turn
from hearth.runtime.text.tokenizer import EncodedPrompt, Tokenizer
from tests.actors.tokenizer.test_actor import harness, prepare
from tests.runtime.text.folders import byte_level, open_tokenizer

T = TypeVar("T")
LONG = "x" * 20000
BULK: list[dict[str, Any]] = [
    {"text": LONG},
    {"chat": Conversation([Turn("user", LONG[:10000])] * 2)},
    {"tokens": [65] * 20000},
]


class Slow:
    """A tokenizer whose long works wait for `go`."""

    def __init__(self, inner: Tokenizer) -> None:
        self.inner = inner
        self.go = threading.Event()
        self.started = threading.Event()
        self.encoded = 0

    def encode(self, text: str, field: str, most: int | None = None) -> list[int]:
        return self._after(len(text), self.inner.encode(text[:8], field, most))

    def encode_chat(self, conversation: Conversation, _most: int | None = None) -> EncodedPrompt:
        return self._after(sum(len(one.content) for one in conversation.turns), EncodedPrompt([1]))

    def decode(self, ids: list[int], *, skip_special: bool) -> str:
        return self._after(len(ids), self.inner.decode(ids[:8], skip_special=skip_special))

    def special_in(self, text: str) -> dict[int, str]:
        return self.inner.special_in(text)

    def _after(self, size: int, result: T) -> T:
        self.encoded += 1
        self.started.set()
        if size > 10000:
            self.go.wait(5)
        return result


@pytest.fixture
def slow(tmp_path_factory: pytest.TempPathFactory) -> Slow:
    return Slow(open_tokenizer(tmp_path_factory.mktemp("engine"), byte_level()))


@pytest.mark.parametrize("work", BULK)
async def test_nobody_waits_for_the_very_long_texts_of_others(
    slow: Slow, work: dict[str, Any]
) -> None:
    async with harness(slow) as made:
        for rid in (1, 2):
            made.mail.post(Convert(rid, **work))
        made.mail.post(prepare(3))
        submit = await made.scheduler.receive()
        assert isinstance(submit, Request)
        assert submit.rid == 3
        assert made.door.receive_nowait() is None
        slow.go.set()
        answers = [await made.door.receive() for _ in range(2)]
        assert [(type(one), getattr(one, "rid", 0)) for one in answers] == [
            (Converted, 1),
            (Converted, 2),
        ]


async def test_what_is_cancelled_before_its_turn_is_never_encoded(slow: Slow) -> None:
    async with harness(slow) as made:
        made.mail.post(prepare(1, LONG))
        assert await anyio.to_thread.run_sync(slow.started.wait, 5)
        for message in (prepare(2, LONG), prepare(3, LONG), Cancel(1), Cancel(2), prepare(4)):
            made.mail.post(message)
        submit = await made.scheduler.receive()
        assert isinstance(submit, Request)
        assert submit.rid == 4
        slow.go.set()
        submit = await made.scheduler.receive()
        assert isinstance(submit, Request)
        assert submit.rid == 3
        assert slow.encoded == 3, "the short one, the one that was being encoded, and the last"


async def test_very_long_texts_have_a_bound_of_their_own(
    slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BULK_LIMIT", 2)
    async with harness(slow) as made:
        for rid in (1, 2, 3, 4):
            made.mail.post(prepare(rid, LONG))
        failed = await made.door.receive()
        assert isinstance(failed, Failed)
        assert (failed.rids, failed.code) == ([4], "queue_full")
        slow.go.set()
        for rid in (1, 2, 3):
            submit = await made.scheduler.receive()
            assert isinstance(submit, Request)
            assert submit.rid == rid


async def test_clients_take_turns_and_one_that_fills_the_lane_gives_way(
    slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BULK_LIMIT", 3)
    async with harness(slow) as made:
        for rid in (1, 2, 3, 4):
            made.mail.post(Convert(rid, text=LONG, client=1))
        for rid in (5, 6, 7):
            made.mail.post(Convert(rid, text=LONG, client=2))
        refused = [await made.door.receive() for _ in range(3)]
        assert [(*one.rids, one.code) for one in refused if isinstance(one, Failed)] == [
            (4, "queue_full"),
            (3, "queue_full"),
            (7, "queue_full"),
        ]
        slow.go.set()
        answers = [await made.door.receive() for _ in range(4)]
        assert [one.rid for one in answers if isinstance(one, Converted)] == [1, 5, 2, 6]
