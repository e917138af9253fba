"""Plain steps: buffers stay where they are, and keys and values have the same bits in each."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from hearth.bench.random_model import Shape, write_random_model
from hearth.runtime.batch import BatchReorder, DecodingInferenceContext, RowState
from hearth.runtime.device.cpu import ops as cpu_sampler
from hearth.runtime.device.cpu.cpu_device import CpuDevice
from hearth.runtime.device.device import SamplerBuffers
from hearth.runtime.executor.engine import EngineOptions
from hearth.runtime.executor.engine_executor import EngineExecutor
from hearth.runtime.executor.simulated_engine import simulated_config
from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.generation.prefill_budget import Chunk
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.generation.vanilla import VanillaStrategy
from hearth.runtime.options import RuntimeOptions, SpeculationOptions
from hearth.runtime.request import RequestOptions, RowRequest, RowToken
from hearth.runtime.runner.engine_runner import LLMEngineRunner
from hearth.runtime.runner.image_merge import ImagePiece
from hearth.runtime.runner.pipeline_io import PipelineIO
from hearth.runtime.runner.shared_resources import SharedResources
from hearth.runtime.sampling import RowSampler, sample_rows
from hearth.runtime.speculation.eagle import EagleProposer
from hearth.runtime.tensors import lora
from hearth.runtime.tensors.tensor import Tensor
from tests.peft_models import write_peft
from tests.references import reference_folder
from tests.runtime.export.trees import export_with_draft
from tests.runtime.generation.prefix_rows import EXACT_INT4, needs_native

CONFIG = simulated_config(vocab_size=50, layers=1, max_batch=3, prefill_chunk=4)


class _Steps(LLMEngineRunner):
    """Notes what each step is given; logits of `bad_rows` are not finite."""

    def __init__(self) -> None:
        device = CpuDevice()
        self.resources = SharedResources.create_for_llm(CONFIG, Path(), device)
        self.io = PipelineIO.create_for_llm(CONFIG, self.resources, device)
        super().__init__(
            CONFIG,
            EngineExecutor.create_for_llm(Path(), CONFIG, EngineOptions(), device),
            self.io,
            self.resources,
            device,
        )
        self.sampler = device.batch_sampler(
            SamplerBuffers(
                self.io.step.logits, self.get_kv_cache().lengths, self.io.step.inputs.next_tokens
            )
        )
        self.chunks: list[list[list[int]]] = []
        self.bad_rows: list[int] = []

    def execute_prefill_step(
        self,
        token_ids: np.ndarray,
        lengths: Sequence[int],
        first: int = 0,
        images: Sequence[ImagePiece] = (),
    ) -> Tensor:
        rows = zip(token_ids.tolist(), lengths, strict=True)
        self.chunks.append([row[:length] for row, length in rows])
        return self._spoil(super().execute_prefill_step(token_ids, lengths, first, images))

    def execute_vanilla_decoding_step(self, rows: int) -> Tensor:
        self.chunks.append([self.io.step.inputs.next_tokens.array[:rows].tolist()])
        return self._spoil(super().execute_vanilla_decoding_step(rows))

    def _spoil(self, logits: Tensor) -> Tensor:
        for row in self.bad_rows:
            logits.view((row + 1, CONFIG.vocab_size))[row, 3] = np.nan
        return logits


def _started(*lengths: int) -> tuple[_Steps, VanillaStrategy, DecodingInferenceContext]:
    runner = _Steps()
    requests = [
        RowRequest(
            token_ids=list(range(1, length + 1)),
            prompt_length=length,
            options=RequestOptions(max_tokens=9),
        )
        for length in lengths
    ]
    context = DecodingInferenceContext(CONFIG)
    context.admit(requests)
    reorder = context.arrange()
    assert reorder is not None
    runner.get_kv_cache().reorder(reorder)
    runner.sampler.reorder(reorder)
    return runner, VanillaStrategy(runner, runner.sampler), context


def _prefill(strategy: VanillaStrategy, context: DecodingInferenceContext) -> list[RowToken]:
    """What a chunk of all joiners gives."""
    rows = context.joiners
    chunk = Chunk(len(rows), min(4, rows[-1].prompt_left))
    return strategy.collect(strategy.prefill_step(context, chunk))


def _decode(strategy: VanillaStrategy, context: DecodingInferenceContext) -> list[RowToken]:
    return strategy.collect(strategy.decode_step(context))


def test_prompts_are_taken_chunk_by_chunk_and_sampled_where_they_end() -> None:
    runner, strategy, context = _started(2, 9, 4)
    reported = []
    while context.joiners:
        reported.append([token.row for token in _prefill(strategy, context)])
    assert runner.chunks == [[[1, 2], [1, 2, 3, 4], [1, 2, 3, 4]], [[5, 6, 7, 8]], [[9]]]
    assert reported == [[0, 2], [], [1]]
    assert [row.filled for row in context.rows] == [2, 4, 9]
    assert runner.get_kv_cache().row_lengths == [2, 4, 9]


def test_a_chunk_of_some_joiners_leaves_the_others_alone() -> None:
    runner, strategy, context = _started(2, 9, 9)
    step = strategy.prefill_step(context, Chunk(1, 2))
    assert (step.lengths, step.computed, step.first) == ([2], 2, 0)
    step = strategy.prefill_step(context, Chunk(1, 3))
    assert (step.lengths, step.computed, step.first) == ([3], 3, 1)
    assert runner.chunks == [[[1, 2]], [[1, 2, 3]]]
    assert runner.get_kv_cache().row_lengths == [2, 3, 0]


def test_a_decode_feeds_the_newest_tokens() -> None:
    runner, strategy, context = _started(2, 3)
    first = _prefill(strategy, context)
    second = _decode(strategy, context)
    assert runner.chunks[1] == [[token.token_id for token in first]]
    assert [token.row for token in second] == [0, 1]
    assert [row.generated for row in context.rows] == [
        [one.token_id, two.token_id] for one, two in zip(first, second, strict=True)
    ]


def test_a_token_is_sampled_for_its_own_position(monkeypatch: pytest.MonkeyPatch) -> None:
    positions: list[list[int]] = []

    def note(
        logits: np.ndarray, samplers: Sequence[RowSampler], asked: Sequence[int]
    ) -> list[RowToken | None]:
        positions.append(list(asked))
        return sample_rows(logits, samplers, asked)

    monkeypatch.setattr(cpu_sampler, "sample_rows", note)
    _, strategy, context = _started(2, 3)
    _prefill(strategy, context)
    _decode(strategy, context)
    assert positions == [[2, 3], [3, 4]]


@pytest.mark.parametrize("bad", [0, 1])
def test_a_row_fails_alone(bad: int) -> None:
    runner, strategy, context = _started(3, 3)
    _prefill(strategy, context)
    runner.bad_rows = [bad]
    errors = [token.error for token in _decode(strategy, context)]
    assert errors == ["non_finite" if row == bad else None for row in range(2)]
    assert [row.state is RowState.FAILED for row in context.rows] == [bad == 0, bad == 1]


def test_a_row_may_fail_in_the_middle_of_its_prompt() -> None:
    runner, strategy, context = _started(9, 6)
    runner.bad_rows = [0]
    reports = _prefill(strategy, context)
    assert [(token.row, token.token_id, token.error) for token in reports] == [
        (1, -1, "non_finite")
    ]
    assert context.rows[1].state is RowState.LIVE


Addresses = set[tuple[int, str, int]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Gives the engines of a base that takes adapters and of its draft, exported once."""

    @cache
    def folder(dialect: str) -> Path:
        target = tmp_path_factory.mktemp("addresses")
        return export_with_draft("qwen3", target, max_lora_rank=8, dialect=dialect)

    return folder


@pytest.fixture(params=[False, True], ids=["any rank", "fixed rank"])
def runtime(
    request: pytest.FixtureRequest,
    folders: Callable[..., Path],
    dialect: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[LLMInferenceRuntime]:
    """One whose inputs of adapters have any rank, and one with slots of the greatest."""
    for module in ("hearth.runtime.tensors.lora", "hearth.runtime.lora.lora_manager"):
        monkeypatch.setattr(f"{module}.has_fixed_rank", lambda _: request.param)
    options = RuntimeOptions(
        max_batch=3,
        speculation=SpeculationOptions(method="eagle", adaptive=False),
        prefix_cache_bytes=1 << 20,
    )
    with closing(LLMInferenceRuntime.open(folders(dialect), options)) as opened:
        yield opened


def addresses(runtime: LLMInferenceRuntime) -> Addresses:
    """Of every binding of the steps of base and draft that decode, adapters of any rank aside."""
    assert runtime._speculation is not None
    proposer = runtime._speculation.proposer
    assert isinstance(proposer, EagleProposer)
    return {
        (engine, name, tensors.get(name).address)
        for engine, steps in enumerate((runtime._runner._steps, proposer._draft._steps))
        for (_, first, _), tensors in steps._maps.items()
        for name in tensors
        if first is None
        if lora.has_fixed_rank(runtime.config) or not name.startswith("lora_")
    }


def row(tokens: list[int], max_tokens: int, adapter: str = "") -> RowRequest:
    options = RequestOptions(max_tokens=max_tokens, ignore_eos=True, adapter=adapter)
    return RowRequest(token_ids=tokens, prompt_length=len(tokens), options=options)


def run_out(runtime: LLMInferenceRuntime, before: Addresses) -> set[int]:
    """Step until no row is left; the buckets that the cache had."""
    sizes = set()
    while runtime.active:
        runtime.step()
        sizes.add(runtime._runner.get_kv_cache().kv.bucket)
        assert addresses(runtime) == before
    return sizes


def test_addresses_outlast_a_join_an_eviction_and_a_growing_bucket(
    runtime: LLMInferenceRuntime,
) -> None:
    before = addresses(runtime)
    runtime.admit([row([7 * n % 280 + 3 for n in range(236)], 40)])
    for _ in range(4):
        runtime.step()
    runtime.admit([row([5, 6, 7], 4), row([8, 9], 20)])
    assert addresses(runtime) == before
    assert len(run_out(runtime, before)) > 1


def test_addresses_outlast_a_switch(runtime: LLMInferenceRuntime, tmp_path: Path) -> None:
    before = addresses(runtime)
    base = reference_folder("qwen3")
    for seed, name in enumerate(("first", "second")):
        write_peft(base, tmp_path / name, rank=8, seed=seed)
        runtime.load_adapter(name, tmp_path / name)
    for name in ("first", "", "second", "first", ""):
        runtime.admit([row([5, 6, 7], 5, name), row([8, 9], 5, name)])
        assert runtime.adapter == name
        run_out(runtime, before)
    runtime.unload_adapter("first")
    assert addresses(runtime) == before


def test_addresses_outlast_a_restore(runtime: LLMInferenceRuntime) -> None:
    before = addresses(runtime)
    prompt = [7 * n % 280 + 3 for n in range(100)]
    for tail in ([5, 6], [8, 9], [5, 6]):
        runtime.admit([row(prompt + tail, 5), row([8, 9], 5)])
        run_out(runtime, before)
    # The first is always tried, as nobody knows yet what loading takes.
    assert runtime.prefill_metrics.reused >= 96


TOKENS, ROWS = 330, 2
DECODE = 0
PLANS = (
    (1, TOKENS - 1),
    (TOKENS - 1, 1),
    (TOKENS - 1, DECODE),
    (*[32] * 10, 10),
    (130, 3, 2, *[1] * 4, *[DECODE] * 21, 170),
    (270, *[DECODE] * 60),
)
"""Widths of the chunks in which a prompt is computed, and decode steps of one token."""
SHAPE = Shape(
    layers=2, hidden=320, heads=6, kv_heads=3, head_dim=64, intermediate=640, vocabulary=1024
)
"""Sums longer than the blocks in which a matrix product adds them up."""
PROMPTS = np.random.default_rng(0).integers(300, 1000, (ROWS, TOKENS))


@pytest.fixture(params=["none", EXACT_INT4])
def exact_runtime(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LLMInferenceRuntime]:
    quantization: Literal["none", "int4"] = request.param
    write_random_model(tmp_path / "model", SHAPE)
    options = ExportOptions(
        dialect="native",
        quantization=quantization,
        head_quantization="body",
        capacity=512,
        prefill_chunk=TOKENS,
    )
    export_model(tmp_path / "model", tmp_path / "engine", options)
    chosen = RuntimeOptions(verify=False, max_batch=ROWS)
    with closing(LLMInferenceRuntime.open(tmp_path / "engine", chosen)) as opened:
        yield opened


def computed(
    runtime: LLMInferenceRuntime, plan: tuple[int, ...], rows: int
) -> tuple[list[NDArray[np.float32]], NDArray[np.float32]]:
    """Keys and values of the first row, and the logits behind it, when `rows` run together."""
    runner = runtime._runner
    request = RowRequest(token_ids=[1], prompt_length=1)
    runner.reset(0)
    runner.get_kv_cache().reorder(BatchReorder.fresh([request] * rows))
    at = 0
    for width in plan:
        piece = PROMPTS[:rows, at : at + max(width, 1)].copy()
        if width == DECODE:
            runner._inputs.next_tokens.array[:rows] = piece[:, 0]
            logits = runner.execute_vanilla_decoding_step(rows)
        else:
            logits = runner.execute_prefill_step(piece, [width] * rows)
        at += piece.shape[1]
    assert at == TOKENS
    size = runtime.config.output_vocab_size
    return runner.get_kv_cache().capture(0, at).attention, logits.array.reshape(-1)[:size].copy()


@needs_native
def test_a_token_has_the_same_bits_in_whatever_step_it_is_computed(
    exact_runtime: LLMInferenceRuntime,
) -> None:
    wanted, logits = computed(exact_runtime, (TOKENS,), 1)
    for plan in PLANS:
        for rows in (1, ROWS):
            found, last = computed(exact_runtime, plan, rows)
            for one, other in zip([*found, last], [*wanted, logits], strict=True):
                assert one.tobytes() == other.tobytes(), (plan, rows)
