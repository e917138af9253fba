from __future__ import annotations

import threading

import anyio.to_thread
import pytest

from hearth.actors.messages import Cancel, Deltas, Request
from hearth.runtime.text import Tokenizer
from tests.actors.stand_ins import SlowTokenizer
from tests.actors.test_tokenizer import house, prepare, step
from tests.runtime.text.folders import byte_level, open_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return open_tokenizer(tmp_path_factory.mktemp("engine"), byte_level())


async def test_what_is_cancelled_while_it_is_encoded_is_not_submitted_and_steps_never_wait(
    tokenizer: Tokenizer,
) -> None:
    slow = SlowTokenizer(tokenizer)
    (a,) = tokenizer.encode("a")
    async with house(slow) as made:
        slow.go.set()
        made.mail.post(prepare(1))
        await made.scheduler.receive()
        slow.go.clear()
        slow.started.clear()
        made.mail.post(prepare(2, "the lamp " * 200))
        assert await anyio.to_thread.run_sync(slow.started.wait, 5)
        made.mail.post(Cancel(2))
        made.mail.post(step([(1, a)]))
        deltas = await made.door.receive()
        assert isinstance(deltas, Deltas)
        assert slow.thread != threading.get_ident()
        slow.go.set()
        made.mail.post(prepare(3))
        submit = await made.scheduler.receive()
        assert isinstance(submit, Request)
        assert submit.rid == 3
        assert len(made.actor._streams) == 2


async def test_a_cancel_behind_its_request_stays_behind_it(tokenizer: Tokenizer) -> None:
    async with house(tokenizer) as made:
        made.mail.post(prepare(1))
        assert isinstance(await made.scheduler.receive(), Request)
        made.mail.post(Cancel(1))
        assert await made.scheduler.receive() == Cancel(1)
        assert len(made.actor._streams) == 0
