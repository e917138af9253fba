"""Steps of an engine, and prompts beside rows that decode, against each row's own logits."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs
from numpy.typing import NDArray

from hearth.runtime.batch import BatchReorder, RowMove
from hearth.runtime.config import load_config
from hearth.runtime.device.cpu.cpu_device import CpuDevice
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.engine import EngineOptions
from hearth.runtime.executor.engine_executor import EngineExecutor
from hearth.runtime.executor.simulated_engine import simulated_config
from hearth.runtime.runner.engine_runner import LLMEngineRunner
from hearth.runtime.runner.pipeline_io import PipelineIO
from hearth.runtime.runner.shared_resources import SharedResources
from hearth.runtime.tensors.profiles import InferenceDims
from hearth.runtime.tensors.tensor import TensorMap
from tests.references import NAMES, ReferenceRow, reference_logits
from tests.runtime.arrangements import keep, new_row, open_runner
from tests.runtime.conftest import EngineFolders

TOLERANCE = 1e-4
Floats = NDArray[np.float32]


def _runner(folder: Path, chunk: int = 256) -> LLMEngineRunner:
    return open_runner(
        folder, structs.replace(load_config(folder), prefill_chunk=chunk), CpuDevice()
    )


def _simulated() -> LLMEngineRunner:
    return open_runner(Path(), simulated_config(layers=1, max_batch=2), CpuDevice())


def _decode(runner: LLMEngineRunner, tokens: Sequence[int]) -> Floats:
    """Run one step with these newest tokens; the logits [rows, V], valid until the next."""
    runner._inputs.next_tokens.array[: len(tokens)] = tokens
    logits = runner.execute_vanilla_decoding_step(len(tokens))
    return logits.view((len(tokens), logits.shape[-1]))


def _prefill(runner: LLMEngineRunner, prompts: list[list[int]], chunk: int) -> list[Floats]:
    """Prefill prompts, longest first, in chunks; the logits after each prompt."""
    runner.reset(len(prompts))
    after: list[Floats] = [np.empty(0, np.float32)] * len(prompts)
    for start in range(0, len(prompts[0]), chunk):
        pieces = [prompt[start : start + chunk] for prompt in prompts if len(prompt) > start]
        token_ids = np.zeros((len(pieces), len(pieces[0])), np.int64)
        for row, piece in enumerate(pieces):
            token_ids[row, : len(piece)] = piece
        buffer = runner.execute_prefill_step(token_ids, [len(piece) for piece in pieces])
        logits = buffer.view((len(pieces), buffer.shape[-1]))
        for row in range(len(pieces)):
            after[row] = logits[row].copy()
    return after


def _assert_decodes_like(runner: LLMEngineRunner, rows: list[ReferenceRow], offsets: range) -> None:
    for offset in offsets:
        places = [row.prompt_length + offset for row in rows]
        tokens = [row.token_ids[place] for row, place in zip(rows, places, strict=True)]
        logits = _decode(runner, tokens)
        wanted = [row.logits[place] for row, place in zip(rows, places, strict=True)]
        assert np.abs(logits - wanted).max() < TOLERANCE


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunk", [256, 5])
def test_logits_agree_with_the_reference_through_prefill_decode_and_eviction(
    engine_folders: EngineFolders, name: str, dialect: str, chunk: int
) -> None:
    runner = _runner(engine_folders(name, dialect), chunk)
    rows = reference_logits(name)
    prompts = [row.token_ids[: row.prompt_length] for row in rows]
    for row, logits in zip(rows, _prefill(runner, prompts, chunk), strict=True):
        assert np.abs(logits - row.logits[row.prompt_length - 1]).max() < TOLERANCE
    _assert_decodes_like(runner, rows, range(4))
    runner.get_kv_cache().reorder(keep(0, 2))
    _assert_decodes_like(runner, [rows[0], rows[2]], range(4, 8))
    runner.get_kv_cache().reorder(keep(1))
    _assert_decodes_like(runner, [rows[2]], range(8, 11))
    runner.close()


def test_a_growing_bucket_changes_no_logits(engine_folders: EngineFolders, dialect: str) -> None:
    runner = _runner(engine_folders("qwen3", dialect))
    token_ids = np.random.default_rng(1).integers(0, 288, 260).tolist()
    short = [5, 6, 7]
    _prefill(runner, [token_ids[:254], short], 256)
    grown = [_decode(runner, [token_ids[254 + step], short[step % 3]]).copy() for step in range(6)]
    assert runner.get_kv_cache().kv.bucket == 384
    (whole,) = _prefill(runner, [token_ids], 256)
    assert np.abs(grown[-1][0] - whole).max() < TOLERANCE
    (other,) = _prefill(runner, [short + short + short], 256)
    assert np.abs(grown[-1][1] - other).max() < TOLERANCE


def test_addresses_outlast_batches_evictions_and_growth(
    engine_folders: EngineFolders, dialect: str
) -> None:
    runner = _runner(engine_folders("qwen3", dialect))
    tensors: TensorMap = runner._steps._tensors
    before = {name: tensors.get(name).address for name in tensors}
    _prefill(runner, [list(range(255)), [1, 2]], 64)
    _decode(runner, [1, 2])
    runner.get_kv_cache().reorder(keep(0))
    _decode(runner, [1])
    assert runner.get_kv_cache().kv.bucket == 384
    assert before == {name: tensors.get(name).address for name in tensors}
    assert tensors.epoch == len(tensors)


def test_nothing_is_copied_beside_the_cache(
    engine_folders: EngineFolders, dialect: str, capfd: pytest.CaptureFixture[str]
) -> None:
    runner = _runner(engine_folders("qwen3", dialect))
    runner.capture_vanilla_decoding_graph([1, 2])
    _prefill(runner, [[1, 2, 3], [4]], 3)
    _decode(runner, [1, 2])
    runner.get_kv_cache().reorder(keep(0))
    _decode(runner, [1])
    assert runner.executor.counters.hits == 2
    assert "in-place optimization not activated" not in capfd.readouterr().err


def test_every_batch_and_bucket_is_captured() -> None:
    runner = _simulated()
    runner.capture_vanilla_decoding_graph([1, 2])
    assert len(runner.executor._graphs) == 2 * len((256, 384, 512, 768, 1024, 2048))
    _prefill(runner, [[1, 2], [3]], 256)
    for _ in range(300):
        _decode(runner, [1, 2])
    counters = runner.executor.counters
    assert (counters.hits, counters.misses) == (300, 1)
    runner.close()
    assert len(runner.executor._graphs) == 0


def test_step_inputs_of_a_prefill() -> None:
    runner = _simulated()
    _prefill(runner, [[1, 2, 3], [4]], 256)
    inputs = runner._inputs
    assert inputs.attention_pos_id.view((2, 3)).tolist() == [[0, 1, 2], [0, 0, 0]]
    assert inputs.last_token_ids.view((2, 1)).tolist() == [[2], [0]]
    assert inputs.inputs_embeds.view((2, 3)).tolist() == [[1, 2, 3], [4, 0, 0]]
    assert runner.get_kv_cache().row_lengths == [3, 1]


def test_step_inputs_of_a_decode() -> None:
    runner = _simulated()
    _prefill(runner, [[1, 2, 3], [4]], 256)
    _decode(runner, [8, 9])
    inputs = runner._inputs
    assert inputs.attention_pos_id.view((2, 1)).tolist() == [[3], [1]]
    assert inputs.last_token_ids.view((2, 1)).tolist() == [[0], [0]]
    assert inputs.inputs_embeds.view((2, 1)).tolist() == [[8], [9]]
    assert runner.get_kv_cache().row_lengths == [4, 2]


def test_the_sizes_of_a_decode_follow_batch_and_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = _simulated()
    _prefill(runner, [[1] * 255, [4]], 255)
    made: list[InferenceDims] = []
    prepare = runner._steps.prepare

    def note(profile: int, dims: InferenceDims, first: int | None = None) -> None:
        made.append(dims)
        prepare(profile, dims, first)

    monkeypatch.setattr(runner._steps, "prepare", note)
    for _ in range(2):
        _decode(runner, [8, 9])
    runner.get_kv_cache().reorder(keep(0))
    _decode(runner, [8])
    decode = InferenceDims.decode
    assert made == [decode(2, 256), decode(2, 384), decode(1, 384)]


@pytest.mark.parametrize(("first", "rows"), [(1, 2), (2, 1), (-1, 1), (0, 0)])
def test_rows_that_are_not_there_take_no_prompt(first: int, rows: int) -> None:
    runner = _simulated()
    _prefill(runner, [[1, 2, 3], [4]], 256)
    with pytest.raises(HearthError, match=f"no {rows} rows from place {first}"):
        runner.execute_prefill_step(np.zeros((rows, 1), np.int64), [1] * rows, first)


def test_a_chunk_that_exceeds_the_capacity_of_a_row_runs_nothing() -> None:
    runner = _simulated()
    _prefill(runner, [list(range(2040)), [4]], 256)
    with pytest.raises(HearthError) as caught:
        runner.execute_prefill_step(np.zeros((2, 9), np.int64), [1, 9])
    assert caught.value.code == "capacity_exceeded"
    assert runner.get_kv_cache().row_lengths == [2040, 1]


def test_accessors(engine_folders: EngineFolders, dialect: str) -> None:
    runner = _runner(engine_folders("qwen3", dialect))
    assert runner.get_engine_config().dialect == dialect
    assert [one.name for one in runner.get_rope_cos_sin_tensors()] == ["rope_cos", "rope_sin"]


def test_each_width_of_a_gpu_is_run_once_before_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = _simulated()
    runner.warm_prefill()
    assert runner.executor.counters.misses == 0
    monkeypatch.setattr("hearth.runtime.runner.engine_runner.prefill_widths", lambda _: (4, 9))
    runner.warm_prefill()
    assert (runner.executor.counters.misses, runner.get_kv_cache().batch) == (2, 0)
    widths = [dims[1] for _, dims, *_ in runner.executor._prepared]  # type: ignore[index]
    assert widths == [4, 9]


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
        self.caches.reorder(BatchReorder(place + 1, assignments=[new_row(place)]))
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
