"""The executor's work and its control."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec import structs

from hearth.actors import messages as m
from hearth.actors.executor.actor import ExecutorActor
from hearth.actors.messages import ExecutorControl, ExecutorMessage, Schedule
from hearth.actors.supervisor_messages import SupervisorMessage
from hearth.runtime.config import RopeConfig
from hearth.runtime.device.cpu.cpu_device import CpuDevice
from hearth.runtime.executor.engine import EngineOptions
from hearth.runtime.executor.simulated_engine import simulated_config
from hearth.runtime.generation.deployment import DeploymentConfig
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.request import RequestOptions, RowRequest
from hearth.runtime.vision.vision_runner import LocalEmbeddings
from tests.fuzz.doors import DOORS, PER_TYPE, Flat
from tests.fuzz.mail import Inbox, Outbox
from tests.fuzz.mutations import mutations

ENCODE = msgspec.msgpack.encode
INCARNATION = 4
END = ENCODE(m.Shutdown())
CONFIG = structs.replace(
    simulated_config(vocab_size=40, layers=1, max_batch=4, capacity=6, prefill_chunk=4),
    head_dim=6,
    rotary_dim=6,
    rope_config=RopeConfig(type="mrope", mrope_section=(1, 1, 1)),
    use_context_dependent_rope=True,
    num_deepstack_features=1,
    image_token_id=5,
)
ROW = RowRequest(token_ids=[1, 2], prompt_length=2, options=RequestOptions(ignore_eos=True))


class House:
    """An executor that gets its mail whenever it would wait, and one after it when it has ended."""

    def __init__(self) -> None:
        device = CpuDevice()
        options = EngineOptions()
        self.embeddings = LocalEmbeddings()
        self.runtime = LLMInferenceRuntime.create(
            DeploymentConfig(CONFIG), Path(), options, device, self.embeddings
        )
        self.work = Inbox(ExecutorMessage)
        self.control = Inbox(ExecutorControl)
        self.tokenizer = Outbox(m.TokenizerMessage)
        self.supervisor = Outbox(SupervisorMessage)
        self.owed: Counter[int] = Counter()
        self.answered: Counter[int] = Counter()
        self._schedules = msgspec.msgpack.Decoder(Schedule)
        self._begin()
        self._mail: Iterator[tuple[Inbox, bytes]] = iter(())
        self.left = False

    def _begin(self) -> None:
        """Begin as an executor does: no schedule, no output, no row that has ended."""
        self._seq = self._number = 0
        self._ended: dict[int, int] = {}

    def run(self, mail: Iterator[tuple[Inbox, bytes]]) -> None:
        """Handle all of it."""
        self._mail, self.left = mail, True
        while self.left:
            ExecutorActor(
                name="executor-1",
                incarnation=INCARNATION,
                inbox=self.work,
                control=self.control,
                to_tokenizer=self.tokenizer,
                to_supervisor=self.supervisor,
                runtime=self.runtime,
            ).run()
            self.look()
            self._begin()
            assert not self.runtime.active

    def more(self, *_: object) -> None:
        """Instead of a wait."""
        self.look()
        assert self.owed == self.answered
        self.owed.clear()
        self.answered.clear()
        try:
            inbox, data = next(self._mail)
        except StopIteration:
            self.left = False
            inbox, data = self.control, END
        inbox.put(data)
        if inbox is self.work:
            self._note_wanted(data)

    def look(self) -> None:
        """Count what is answered."""
        self.supervisor.take()
        for message in self.tokenizer.take():
            assert isinstance(message, m.StepOutput)
            self._number = message.number
            failed = [rid for failure in message.failed for rid in failure.rids]
            ended = [*message.finished, *message.preempted, *failed]
            self._ended.update(dict.fromkeys(ended, message.number))
            self.answered.update(ended)

    def _note_wanted(self, data: bytes) -> None:
        try:
            wanted = self._schedules.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return
        if wanted.incarnation != INCARNATION or wanted.seq <= self._seq:
            return
        self._seq = wanted.seq
        self._ended = {rid: told for rid, told in self._ended.items() if told > wanted.heard}
        gone = {*self._ended, *wanted.cancelled}
        self.owed.update({*wanted.rows} & {*wanted.new} - gone)
        self._ended.update(dict.fromkeys(wanted.cancelled, self._number + 1))


class Rising:
    """A list of one number, which is another one each time."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return 1

    def __getitem__(self, _: int) -> int:
        return next(self._numbers)


def rows_with_images(store: LocalEmbeddings) -> Iterator[list[Any]]:
    """Rows whose images lie where they may, and anywhere else."""
    random = Random(4)
    slot = structs.astuple(store.put(np.ones((2, 2, 1), np.float32)))
    numbers = (0, 1, 2, 2, 3, -1, 1 << 31, (1 << 63) - 1)
    steps = (1.0, 0.0, 2.5, -1.0, 1e300, float("inf"), float("nan"))
    good: list[Any] = [0, 2, 0, [1, 1, 2], 1.0]
    yield [[1, 1, 2], 3, {"max_tokens": 2}, [[slot, 2, [good]]]]
    for _ in range(200):
        span = [random.choice(numbers) for _ in range(3)]
        grid = [random.choice(numbers) for _ in range(3)] if random.random() < 0.8 else [0, 0, 0]
        spans = [[*span, grid, random.choice(steps)], good]
        image = [
            random.choice((slot, [0, 0, 0])),
            random.choice(numbers),
            spans[: random.choice((1, 2))],
        ]
        yield [[1, 1, 2], 3, {"max_tokens": 2}, [image] * random.choice((1, 2))]


@pytest.mark.parametrize("which", ["ExecutorMessage", "ExecutorControl"])
def test_every_message_to_the_executor(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    house, told = House(), 0
    monkeypatch.setattr("hearth.actors.executor.actor.wait_any", house.more)
    inbox = house.work if which == "ExecutorMessage" else house.control
    rows: list[Any] = [[[number], 1, {"max_tokens": 3}] for number in range(1, 5)]
    rows += rows_with_images(house.embeddings)
    given: dict[str, Any] = {
        "incarnation": [INCARNATION],
        "seq": Rising(),
        "rows": [[1, 2, 3, 4], [1], [2, 3]],
        "new": [dict(zip((1, 2, 3, 4), rows[at:], strict=False)) for at in range(len(rows))],
        "cancelled": [[], [], [1]],
    }
    good = ENCODE(Schedule(INCARNATION, 1, 0, [1, 2], {1: ROW, 2: ROW}))

    def mail(part: int) -> Iterator[tuple[Inbox, bytes]]:
        nonlocal told
        for kind in DOORS[which]:
            for data in mutations(kind, f"{kind} {part}", -(-PER_TYPE // 4), ENCODE, given):
                told += 1
                yield inbox, data
                if told % 4 == 0:
                    yield (house.work, good) if inbox is house.control else (house.control, END)

    house.run(mail(0))
    flat, before = Flat(), told
    for part in (1, 2, 3):
        house.run(mail(part))
    flat.check(told - before)
    assert told >= PER_TYPE * len(DOORS[which])
    if inbox is house.work:
        assert house.runtime.get_multimodal_metrics().images > 0
    house.run(iter([(house.work, good)]))
    house.runtime.close()
