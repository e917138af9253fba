"""Prompts that are prefilled beside rows that decode, against each row's own logits."""

from pathlib import Path

import numpy as np
import pytest
from msgspec import structs
from numpy.typing import NDArray

from hearth.runtime.batch import BatchReorder, RowMove, SlotAssignment
from hearth.runtime.config import load_config
from hearth.runtime.device.cpu.cpu_device import CpuDevice
from hearth.runtime.executor.engine import EngineOptions
from hearth.runtime.executor.engine_executor import EngineExecutor
from hearth.runtime.runner.engine_runner import LLMEngineRunner
from hearth.runtime.runner.pipeline_io import PipelineIO
from hearth.runtime.runner.shared_resources import SharedResources
from tests.references import NAMES, ReferenceRow, reference_logits
from tests.runtime.arrangements import REQUEST
from tests.runtime.conftest import EngineFolders

TOLERANCE = 1e-4
PLACES = 3


class House:
    """A runner whose rows read the tokens of `references`; decoding rows come first."""

    def __init__(self, folder: Path, references: list[ReferenceRow]) -> None:
        config = structs.replace(load_config(folder), max_supported_batch_size=PLACES)
        device = CpuDevice()
        resources = SharedResources.create_for_llm(config, folder, device)
        self.io = PipelineIO.create_for_llm(config, resources, device)
        executor = EngineExecutor.create_for_llm(folder, config, EngineOptions(threads=1), device)
        self.runner = LLMEngineRunner(config, executor, self.io, resources, device)
        self.caches = self.runner.get_kv_cache()
        self.references = references
        self.rows: list[int] = []
        self.decoding = 0
        self.seen: dict[tuple[int, int], NDArray[np.float32]] = {}

    def seat(self, number: int) -> None:
        """Row `number` takes the last place, its whole prompt before it."""
        place = len(self.rows)
        self.caches.reorder(BatchReorder(place + 1, assignments=[SlotAssignment(place, REQUEST)]))
        self.rows.append(number)

    def leave(self, place: int) -> None:
        """A decoding row leaves: the last of those fills its place, the last of all theirs."""
        moves, last = [], self.decoding - 1
        if place != last:
            moves.append(RowMove(last, place, 0))
        if last != len(self.rows) - 1:
            moves.append(RowMove(len(self.rows) - 1, last, 0))
        reorder = BatchReorder(len(self.rows) - 1, moves)
        self.caches.reorder(reorder)
        self.rows = reorder.settle(self.rows, lambda _: -1)
        self.decoding -= 1

    def prefill(self, width: int, joiners: int) -> None:
        """A chunk of the first joiners, at most `width` tokens of each."""
        first = self.decoding
        places = range(first, first + joiners)
        begins = [self.caches.row_lengths[place] for place in places]
        prompts = [self._reference(place).prompt_length for place in places]
        lengths = [min(width, end - begin) for begin, end in zip(begins, prompts, strict=True)]
        ids = np.zeros((joiners, max(lengths)), np.int64)
        for i, (begin, length) in enumerate(zip(begins, lengths, strict=True)):
            ids[i, :length] = self._reference(first + i).token_ids[begin : begin + length]
        self.runner.execute_prefill_step(ids, lengths, first)
        self._check(first, joiners)
        ended = [begin + n == end for begin, n, end in zip(begins, lengths, prompts, strict=True)]
        assert ended == sorted(ended, reverse=True)
        self.decoding += sum(ended)

    def decode(self) -> None:
        """A step of the decoding rows, each with the token that is behind its filled slots."""
        tokens = self.io.step.inputs.next_tokens.array
        for place in range(self.decoding):
            tokens[place] = self._reference(place).token_ids[self.caches.row_lengths[place]]
        self.runner.execute_vanilla_decoding_step(self.decoding)
        self._check(0, self.decoding)

    def _reference(self, place: int) -> ReferenceRow:
        return self.references[self.rows[place]]

    def _check(self, first: int, rows: int) -> None:
        logits = self.io.step.logits.view((rows, self.io.step.logits.shape[-1]))
        for i, row in enumerate(logits):
            filled = self.caches.row_lengths[first + i]
            number = self.rows[first + i]
            assert np.abs(row - self.references[number].logits[filled - 1]).max() < TOLERANCE
            self.seen[number, filled] = row.copy()


def _schedule(house: House) -> None:
    """Two rows join while one decodes, from different slots, and take the places of the first."""
    house.seat(0)
    house.prefill(256, 1)
    house.decode()
    house.seat(2)
    house.prefill(1, 1)
    house.seat(1)
    house.decode()
    house.prefill(1, 2)
    house.decode()
    while house.decoding < len(house.rows):
        house.prefill(2, 1)
        house.decode()
    house.leave(0)
    house.decode()
    house.seat(0)
    house.prefill(3, 1)
    house.leave(1)
    house.prefill(256, 1)
    house.decode()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("padded", [False, True])
def test_rows_that_join_have_the_logits_that_they_have_alone(
    engine_folders: EngineFolders, name: str, dialect: str, *, padded: bool
) -> None:
    references = reference_logits(name)
    house = House(engine_folders(name, dialect), references)
    if padded:
        # As on a GPU: what runs behind the decoding rows writes into those that join.
        house.runner._steps._batches = (PLACES,)
    _schedule(house)
    if dialect == "native":
        for number in range(3):
            alone = House(engine_folders(name, dialect), references)
            alone.seat(number)
            alone.prefill(256, 1)
            for _ in range(8):
                alone.decode()
            same = house.seen.keys() & alone.seen.keys()
            assert all(np.array_equal(house.seen[one], alone.seen[one]) for one in same)
            assert len(same) > 2
