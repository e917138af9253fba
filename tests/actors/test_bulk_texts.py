from __future__ import annotations

import threading
from typing import Any, TypeVar

import pytest

from actors import tokenizer as module
from actors.messages import Cancel, ChatTurn, Convert, Converted, Failed, Submit
from runtime.text import Tokenizer
from tests.actors.test_tokenizer import house, prepare
from tests.runtime.text.folders import byte_level, open_tokenizer

T = TypeVar("T")
LONG = "x" * 20000
BULK: list[dict[str, Any]] = [
    {"text": LONG},
    {"turns": [ChatTurn("user", LONG[:10000])] * 2},
    {"tokens": [65] * 20000},
]


class Slow:
    """A tokenizer whose long works wait for `go`."""

    def __init__(self, inner: Tokenizer) -> None:
        self.inner = inner
        self.go = threading.Event()

    def encode(self, text: str, field: str) -> list[int]:
        return self._after(len(text), self.inner.encode(text[:8], field))

    def encode_chat(self, turns: list[tuple[str, str]]) -> list[int]:
        return self._after(sum(len(text) for _, text in turns), [1])

    def decode(self, ids: list[int], *, skip_special: bool) -> str:
        return self._after(len(ids), self.inner.decode(ids[:8], skip_special=skip_special))

    def _after(self, size: int, result: T) -> T:
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
    async with house(slow) as made:
        for rid in (1, 2):
            made.mail.post(Convert(rid, **work))
        made.mail.post(prepare(3))
        submit = await made.scheduler.receive()
        assert isinstance(submit, Submit)
        assert submit.rid == 3
        assert made.door.receive_nowait() is None
        slow.go.set()
        answers = [await made.door.receive() for _ in range(2)]
        assert [(type(one), getattr(one, "rid", 0)) for one in answers] == [
            (Converted, 1),
            (Converted, 2),
        ]


async def test_a_cancel_stays_behind_its_very_long_request(slow: Slow) -> None:
    async with house(slow) as made:
        for message in (prepare(1, LONG), Cancel(1)):
            made.mail.post(message)
        # It is early for those whose request is elsewhere, and nobody minds.
        assert await made.scheduler.receive() == Cancel(1)
        slow.go.set()
        submit = await made.scheduler.receive()
        assert isinstance(submit, Submit)
        assert await made.scheduler.receive() == Cancel(1)
        assert len(made.actor._streams) == 0


async def test_very_long_texts_have_a_bound_of_their_own(
    slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BULK_LIMIT", 2)
    async with house(slow) as made:
        for rid in (1, 2, 3, 4):
            made.mail.post(prepare(rid, LONG))
        failed = await made.door.receive()
        assert isinstance(failed, Failed)
        assert (failed.rid, failed.code) == (4, "queue_full")
        slow.go.set()
        for rid in (1, 2, 3):
            submit = await made.scheduler.receive()
            assert isinstance(submit, Submit)
            assert submit.rid == rid
