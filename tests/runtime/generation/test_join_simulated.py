"""Thousands of schedules on an engine that remembers, against a model of the batch."""

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import NamedTuple
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from hearth.runtime.batch import DecodingRow
from hearth.runtime.device.cpu.cpu_device import CpuDevice
from hearth.runtime.ewma import Ewma
from hearth.runtime.executor.engine import EngineOptions
from hearth.runtime.generation.deployment import DeploymentConfig
from hearth.runtime.generation.prefill_budget import PrefillBudget
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.kv_cache.page_index import PageIndex
from hearth.runtime.kv_cache.pages import TierCapacity
from hearth.runtime.options import SpeculationOptions
from hearth.runtime.speculation.policy import SpeculationPolicy
from tests.runtime.generation.schedules.alone import Alone, judge
from tests.runtime.generation.schedules.faults import failing_steps
from tests.runtime.generation.schedules.remembering import (
    CHUNK,
    CONFIG,
    POISON,
    ROWS,
    SEES,
    SLOTS,
    STORE,
    RememberingEngine,
    pictured_voices,
    text_of,
    voices,
)
from tests.runtime.generation.schedules.schedule import Bounds, Choices, draw_schedule
from tests.runtime.generation.schedules.shadow import Shadow, watching
from tests.runtime.generation.schedules.trial import Trial

SCHEDULES = 5_600
"""Of all kinds; each run of the suite draws others."""
BYTES = 120
"""A schedule is made of."""
OF_TEXT = voices()
VOICES = [*OF_TEXT, *pictured_voices()]
TEXTS = [text_of(voice) for voice in VOICES]
BOUNDS = Bounds(voices=len(OF_TEXT), rows=7, tokens=7, borders=4)
SEEING_BOUNDS = BOUNDS._replace(voices=len(VOICES))
KNOWN = {voice.prompt: text for voice, text in zip(VOICES, TEXTS, strict=True)}
CHAIN = 4


class Kind(NamedTuple):
    """How the runtime runs: like a CPU, whose buckets grow, or like a GPU.

    The latter pads its steps, has one bucket, queues a step before it reads the one before, and
    has graphs of its steps, those of prompts too. One that sees has rows with images among others.
    With `prefix` rows begin with what others have left in pages, of which there are few.
    """

    gpu: bool
    chains: bool
    sees: bool = False
    prefix: bool = True


KINDS = (
    *(Kind(gpu, chains) for gpu in (False, True) for chains in (False, True)),
    Kind(gpu=False, chains=True, sees=True),
    Kind(gpu=True, chains=False, sees=True),
    Kind(gpu=True, chains=True, prefix=False),
)


def chain(row: DecodingRow) -> list[int]:
    """What may follow a row's tokens: all right, some, or none, and now and then a poisoned one."""
    known = KNOWN[tuple(row.token_ids[: row.prompt_length])].tokens
    place = len(row.token_ids) - row.prompt_length
    right = [token.token_id for token in known[place : place + CHAIN]]
    wrong = (len(row.token_ids) * 7 + row.prompt_length) % 9
    return [POISON if wrong == 1 else 3 if i == wrong else one for i, one in enumerate(right)]


def proposals(rows: Sequence[DecodingRow], speculating: Sequence[bool]) -> list[list[int]]:
    return [chain(row) if wanted else [] for row, wanted in zip(rows, speculating, strict=True)]


class FixedBudget(PrefillBudget):
    """Chunks of so many tokens while rows decode, so that a schedule runs the same again."""

    limit = CHUNK

    @property
    def tokens(self) -> int:
        return self.limit


class Coin(SpeculationPolicy):
    """Wants rounds by turns of different length, so that they and decode steps are mixed."""

    def __init__(self) -> None:
        super().__init__(ROWS)
        self._asked = 0

    def wants(self, _batch: int) -> bool:
        self._asked += 1
        return self._asked // 5 % 3 != 1


class House:
    """A runtime of a kind, opened again when it has broken a promise."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._tiers = TierCapacity(0)
        if kind.prefix:
            # What leaves the memory of a GPU goes to the host's.
            self._tiers = TierCapacity(3, 3) if kind.gpu else TierCapacity(5)
        self._opened: LLMInferenceRuntime | None = None
        self.ends = Counter[str]()
        self.together = self.reused = 0

    def trial(self, data: bytes) -> None:
        """Run the schedule that these bytes make."""
        choices = Choices(data)
        schedule = draw_schedule(choices, SEEING_BOUNDS if self._kind.sees else BOUNDS)
        runtime, self._opened = self._opened or self._open(), None
        runtime._prompts = FixedBudget(CHUNK, SLOTS, 1.0, Ewma(1.0))
        runtime._prompts.limit = choices.of((CHUNK, 1, 5, 20, 64))
        if runtime._speculation is not None:
            runtime._speculation._policy = Coin()
        plans = schedule.rows
        if not self._kind.chains:
            plans = tuple(structs.replace(plan, speculation=None) for plan in plans)
        requests = [VOICES[plan.voice].row(plan) for plan in plans]
        if runtime._prefix is not None:
            # A schedule runs the same again.
            runtime._prefix._index = PageIndex(self._tiers)
        widths = (CHUNK,) if self._kind.gpu else ()
        shadow = Shadow(ROWS, CHUNK, SLOTS, widths)
        captured = patch("hearth.runtime.tensors.profiles.captured_widths", lambda _: widths)
        with captured, failing_steps(runtime, schedule), watching(runtime, shadow):
            replies = Trial(runtime, schedule, requests, int(self._kind.gpu)).run()
        for plan, request, reply in zip(plans, requests, replies, strict=True):
            longest = plan.tokens or runtime.capacity - request.prompt_length
            judge(reply, request, longest, Alone(TEXTS[plan.voice], []), 0.0)
            self.ends[reply.end] += 1
            self.together += reply.placed > 1
        self.reused = runtime.prefill_metrics.reused
        self._opened = runtime

    def _open(self) -> LLMInferenceRuntime:
        device = CpuDevice()
        device.steps_ahead = int(self._kind.gpu)
        config = SEES if self._kind.sees else CONFIG
        tiers = self._tiers
        deployment = DeploymentConfig(config, prefix=tiers)
        if self._kind.chains:
            config = structs.replace(config, max_verify_tree_size=CHAIN + 1)
            options = SpeculationOptions(method="lookup", lookup_tokens=CHAIN, adaptive=False)
            deployment = DeploymentConfig(config, "lookup", options, prefix=tiers)
        with ExitStack() as patches:
            values: dict[str, object] = {
                "executor.engine_executor.SimulatedEngine": RememberingEngine,
                # What others take meanwhile would keep steps from being captured.
                "runner.engine_runner.available_memory": lambda: 1 << 30,
            }
            if self._kind.gpu:
                values["runner.bindings.decode_batches"] = lambda _: (1, 2, 4)
                values["tensors.profiles.captured_widths"] = lambda _: (CHUNK,)
            else:
                values["tensors.profiles.SMALLEST_BUCKET"] = SLOTS // 4
            for name, value in values.items():
                patches.enter_context(patch(f"hearth.runtime.{name}", value))
            runtime = LLMInferenceRuntime.create(deployment, Path(), EngineOptions(), device, STORE)
            if self._kind.gpu:
                assert runtime.capture(range(1, ROWS + 1)) == []
                assert runtime.prompt_graphs.captures == ROWS
        if runtime._speculation is not None:
            runtime._speculation.proposer._proposals = proposals  # type: ignore[attr-defined] # of a lookup
        return runtime


def shrink(house: House) -> None:
    """Let Hypothesis look for a small schedule that fails, and show it.

    It takes a quarter more time for each than random bytes do, so it is asked only then.
    """

    @settings(max_examples=SCHEDULES, deadline=None, database=None)
    @given(st.binary(min_size=BYTES, max_size=BYTES))
    def schedules(data: bytes) -> None:
        house.trial(data)

    schedules()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_row_is_as_if_alone(kind: Kind) -> None:
    house, random, data = House(kind), Random(), b""
    try:
        for _ in range(SCHEDULES // len(KINDS)):
            data = random.randbytes(BYTES)
            house.trial(data)
    except Exception:
        shrink(house)
        print("fails on", data.hex())  # noqa: T201 - where none that is smaller was found
        raise
    assert (house.reused > 500) == kind.prefix
    assert {"stop", "length", "cancelled", "non_finite", "executor_failed"} <= set(house.ends)
