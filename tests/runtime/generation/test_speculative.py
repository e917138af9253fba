"""Rounds of speculation, with a proposer that knows the truth and nodes that are not finite."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from msgspec import structs

from hearth.runtime.batch import DecodingInferenceContext, DecodingRow
from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.device.cpu.cpu_device import CpuDevice
from hearth.runtime.device.device import TreeBuffers, TreeOps
from hearth.runtime.device.mapped_tensors import map_tensor
from hearth.runtime.engine_folder import EMBEDDING_FILE
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.engine import EngineOptions
from hearth.runtime.executor.simulated_engine import simulated_config, simulated_next_tokens
from hearth.runtime.generation.assembly import assemble
from hearth.runtime.generation.batch_runtime import StepResult
from hearth.runtime.generation.deployment import DeploymentConfig, load_deployment
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.generation.speculative import SpeculativeStrategy, VerifyStep
from hearth.runtime.kv_cache.kv_cache_manager import HybridCacheManager
from hearth.runtime.options import RuntimeOptions, SpeculationOptions
from hearth.runtime.reference.token_trees import NO_NODE
from hearth.runtime.request import GenerationRequest, RequestOptions, RowRequest, RowRound
from hearth.runtime.speculation.eagle import EagleProposer
from hearth.runtime.speculation.policy import SpeculationPolicy
from hearth.runtime.speculation.proposer import LookupProposer
from tests.runtime.export.trees import export_with_draft

NODES = 5
VOCABULARY = 97
CONFIG = structs.replace(
    simulated_config(vocab_size=VOCABULARY, layers=2, max_batch=4, capacity=64, prefill_chunk=16),
    max_verify_tree_size=NODES,
)
Hits = Callable[[int], int]


def following(token: int, position: int, ends: Sequence[int] = CONFIG.eos_token_ids) -> int:
    """The simulated engine's token after `token` at `position`."""
    args = np.array([token]), np.array([position])
    return int(simulated_next_tokens(*args, VOCABULARY, ends)[0])


def expected(token_ids: list[int], tokens: int, ends: Sequence[int] = (0,)) -> list[int]:
    """What the engine gives after `token_ids`."""
    grown = list(token_ids)
    for _ in range(tokens):
        grown.append(following(grown[-1], len(grown) - 1, ends))
    return grown[len(token_ids) :]


class OracleProposer(LookupProposer):
    """Chains whose first `hits(position)` tokens are right; the others are wrong."""

    def __init__(self, ops: TreeOps, hits: Hits) -> None:
        super().__init__(ops, SpeculationOptions(lookup_tokens=NODES - 1), fixed_width=False)
        self.hits = hits
        self.kept: list[list[int]] = []

    def _proposals(
        self, rows: Sequence[DecodingRow], speculating: Sequence[bool]
    ) -> list[list[int]]:
        return [
            self._chain(row.token_ids) if wanted else []
            for row, wanted in zip(rows, speculating, strict=True)
        ]

    def accepted(
        self,
        rows: Sequence[DecodingRow],  # noqa: ARG002 - as the protocol has it
        nodes: Sequence[Sequence[int]],
        width: int,  # noqa: ARG002 - as the protocol has it
    ) -> None:
        self.kept += [list(path) for path in nodes]

    def _chain(self, known: list[int]) -> list[int]:
        chain = expected(known, NODES - 1)
        for place in range(self.hits(len(known)), NODES - 1):
            chain[place] = (chain[place] + 1) % VOCABULARY
        return chain


def make(
    hits: Hits,
    config: LLMEngineRunnerConfig = CONFIG,
    *,
    steps_ahead: int = 0,
    policy: SpeculationPolicy | None = None,
) -> tuple[LLMInferenceRuntime, OracleProposer]:
    device = CpuDevice()
    device.steps_ahead = steps_ahead
    parts = assemble(DeploymentConfig(config, "lookup"), Path(), EngineOptions(), device)
    runner, _, sampler, built, *_ = parts
    assert built is not None
    trees: TreeBuffers = built._trees
    proposer = OracleProposer(device.tree_ops, hits)
    strategy = SpeculativeStrategy(runner, sampler, trees, proposer, policy)
    return LLMInferenceRuntime(runner, device, sampler, strategy), proposer


def row(token_ids: list[int], max_tokens: int, *, speculation: bool | None = None) -> RowRequest:
    return RowRequest(
        token_ids=token_ids,
        prompt_length=len(token_ids),
        options=RequestOptions(max_tokens=max_tokens, speculation=speculation),
    )


def drain(runtime: LLMInferenceRuntime) -> tuple[dict[int, list[int]], list[StepResult]]:
    tokens: dict[int, list[int]] = {}
    steps = []
    while runtime.active:
        steps.append(runtime.step())
        for token in steps[-1].tokens:
            tokens.setdefault(token.row, []).append(token.token_id)
    return tokens, steps


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("hits", [0, 1, 3, 4])
def test_text_is_that_of_vanilla_steps(hits: int, steps_ahead: int) -> None:
    runtime, proposer = make(lambda _: hits, steps_ahead=steps_ahead)
    prompts = [[3], list(range(1, 40)), [5, 6, 7]]
    runtime.admit([row(prompt, 6 + 3 * place) for place, prompt in enumerate(prompts)])
    tokens, steps = drain(runtime)
    for place, prompt in enumerate(prompts):
        assert tokens[place] == expected(prompt, 6 + 3 * place)
    assert {step.kind for step in steps} == {"prefill", "verify"}
    assert all(path == list(range(hits + 1)) for path in proposer.kept)


def test_a_row_gets_no_token_beyond_its_limit() -> None:
    runtime, _ = make(lambda _: 4)
    runtime.admit([row([3], 8), row([4], 3)])
    tokens, steps = drain(runtime)
    assert [len(tokens[0]), len(tokens[1])] == [8, 3]
    finishes = [token.finish for step in steps for token in step.tokens if token.row == 1]
    assert finishes == [None, None, "length"]
    # The first token comes with the prompt, the next five and two with the rounds.
    assert steps[1].rounds == [RowRound(0, 4, 5), RowRound(1, 4, 2)]
    assert steps[2].rounds == [RowRound(0, 4, 2)]


def test_a_row_gets_no_token_beyond_an_end_token() -> None:
    stream = expected([3], 12)
    runtime, proposer = make(lambda _: 4)
    # The simulated engine never gives its own end token; the runtime is told of another.
    runtime._context._end_tokens = frozenset({stream[2]})
    runtime.admit([row([3], 12)])
    tokens, steps = drain(runtime)
    assert tokens[0] == stream[:3]
    assert steps[-1].tokens[-1].finish == "stop"
    assert steps[-1].rounds == [RowRound(0, 4, 2)]
    assert proposer.kept == [[0, 1, 2, 3, 4]]
    # What was accepted behind the end went into the cache, and to nobody.
    assert runtime.generation_metrics.tokens == len(tokens[0]) - 1


def test_rows_of_both_kinds_share_a_round() -> None:
    runtime, proposer = make(lambda _: 4)
    runtime.admit([row([3], 9), row([4], 9, speculation=False)])
    tokens, steps = drain(runtime)
    assert tokens == {0: expected([3], 9), 1: expected([4], 9)}
    assert steps[1].rounds == [RowRound(0, 4, 5)]
    assert proposer.kept[:2] == [[0, 1, 2, 3, 4], [0]]


def test_a_row_has_room_for_trees_to_its_end() -> None:
    runtime, _ = make(lambda _: 0)
    assert runtime.capacity == 64 - (NODES - 1)
    with pytest.raises(HearthError) as caught:
        runtime.check(row([3], runtime.capacity))
    assert caught.value.code == "capacity_exceeded"
    runtime.admit([row([3], runtime.capacity - 1), row([4], 1)])
    tokens, steps = drain(runtime)
    assert tokens[0] == expected([3], runtime.capacity - 1)
    assert {step.kind for step in steps[1:]} == {"verify"}


def test_a_policy_that_declines_leaves_vanilla_steps_to_rows_that_do_not_ask() -> None:
    class Declines(SpeculationPolicy):
        def wants(self, batch: int) -> bool:
            return batch < 0

    runtime, _ = make(lambda _: 4, policy=Declines(4))
    runtime.admit([row([3], 9), row([4], 4, speculation=True)])
    tokens, steps = drain(runtime)
    assert tokens == {0: expected([3], 9), 1: expected([4], 4)}
    assert [step.kind for step in steps] == ["prefill", "verify"] + ["decode"] * 7
    assert steps[1].rounds == [RowRound(1, 4, 3)]


def test_the_policy_hears_of_rounds_and_steps() -> None:
    class Notes(SpeculationPolicy):
        def __init__(self) -> None:
            super().__init__(4)
            self.rounds: list[tuple[int, int]] = []
            self.steps: list[int] = []

        def wants(self, batch: int) -> bool:
            return batch == 2

        def record_step(self, batch: int, seconds: float) -> None:
            assert seconds > 0
            self.steps.append(batch)

        def record_round(self, batch: int, tokens: int, seconds: float) -> None:
            assert seconds > 0
            self.rounds.append((batch, tokens))

    policy = Notes()
    runtime, _ = make(lambda _: 2, policy=policy)
    runtime.admit([row([3], 9), row([4], 4)])
    drain(runtime)
    assert policy.rounds == [(2, 6)]
    assert policy.steps == [1] * 5


def test_metrics_count_what_rounds_gave() -> None:
    runtime, _ = make(lambda position: position % 3)
    runtime.admit([row([3], 12), row([4], 12)])
    _, steps = drain(runtime)
    rounds = [one for step in steps for one in step.rounds]
    metrics = runtime.speculation_metrics
    assert metrics.rounds == len(rounds)
    assert metrics.accepted == sum(one.accepted for one in rounds) == 22
    assert metrics.drafted == 4 * len(rounds)
    assert min(metrics.draft_s, metrics.verify_s, metrics.commit_s) > 0
    assert runtime.generation_metrics.steps == len(steps) - 1


def test_rows_put_back_know_all_their_tokens() -> None:
    runtime, _ = make(lambda _: 4)
    runtime.admit([row([3], 20)])
    for _ in range(3):
        runtime.step()
    assert runtime.release(0) == expected([3], 11)


@pytest.mark.parametrize("for_good", [True, False])
def test_a_row_with_broken_numbers_goes_on_without_trees(
    monkeypatch: pytest.MonkeyPatch, *, for_good: bool
) -> None:
    runtime, proposer = make(lambda _: 2)
    zeroed: list[int] = []
    monkeypatch.setattr(proposer, "zero_row", lambda place, _: zeroed.append(place))
    runtime.admit([row([3], 12), row([4], 12)])
    first = [one.token_id for one in runtime.step().tokens]
    logits = runtime._vanilla.sampler._logits  # type: ignore[attr-defined] # that of the CPU
    run = runtime._runner.execute_eagle_base_tree_decoding_step

    def poison(rows: int, width: int) -> object:
        result = run(rows, width)
        logits.reshape(-1)[width * VOCABULARY] = np.nan
        return result

    with monkeypatch.context() as once:
        once.setattr(runtime._runner, "execute_eagle_base_tree_decoding_step", poison)
        steps = [runtime.step()]
        assert steps[0].rounds == [RowRound(0, 4, 3)]
        assert {one.row for one in steps[0].tokens} == {0}
        assert zeroed == [1]
        if for_good:
            steps.append(runtime.step())
    while runtime.active:
        steps.append(runtime.step())
    found: dict[int, list[int]] = {index: [token] for index, token in enumerate(first)}
    for one in (token for step in steps for token in step.tokens):
        found[one.row].append(one.token_id)
    second = [*expected([4], 1), -1] if for_good else expected([4], 12)
    assert found == {0: expected([3], 12), 1: second}
    assert {one.row for step in steps for one in step.rounds} == {0}


def test_speculation_is_refused_where_there_is_none() -> None:
    plain = DeploymentConfig(structs.replace(CONFIG, max_verify_tree_size=0))
    runtime = LLMInferenceRuntime.create(plain, Path(), EngineOptions())
    runtime.check(row([3], 4, speculation=False))
    with pytest.raises(HearthError, match="without speculation") as caught:
        runtime.check(row([3], 4, speculation=True))
    assert (caught.value.code, caught.value.field) == ("unsupported_option", "speculation")


def test_tokens_are_told_though_the_next_round_cannot_be_queued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime, _ = make(lambda _: 4, steps_ahead=1)
    strategy = runtime._speculation
    assert strategy is not None
    runtime.admit([row([5, 6], 30)])
    tokens = [token.token_id for _ in range(2) for token in runtime.step().tokens]
    queue = strategy.verify_step
    queued: list[VerifyStep] = []

    def fail(context: DecodingInferenceContext) -> VerifyStep:
        if queued:
            raise HearthError("executor_failed", "as asked")
        queued.append(queue(context))
        return queued[0]

    monkeypatch.setattr(strategy, "verify_step", fail)
    runtime._drop_verify()
    known = len(tokens)
    tokens += [token.token_id for token in runtime.step().tokens]
    assert len(tokens) > known
    # Nobody comes between the failure and its telling, who would share it.
    assert runtime.free == 0
    with pytest.raises(HearthError, match="as asked"):
        runtime.step()
    assert not runtime.active
    assert runtime.free == runtime.max_batch


def test_who_comes_when_a_round_that_failed_has_lost_its_rows_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime, _ = make(lambda _: 4, steps_ahead=1)
    strategy = runtime._speculation
    assert strategy is not None
    (number,) = runtime.admit([row([5, 6], 30)])
    for _ in range(2):
        runtime.step()
    runtime._drop_verify()
    queue = strategy.verify_step
    runtime._in_flight.append(queue(runtime._context))
    monkeypatch.setattr(strategy, "verify_step", failing)
    runtime.step()
    monkeypatch.setattr(strategy, "verify_step", queue)
    runtime.leave(number)
    assert runtime.free == runtime.max_batch
    runtime.admit([row([5, 6], 6)])
    tokens, _ = drain(runtime)
    assert [len(one) for one in tokens.values()] == [6]


def failing(_: object) -> VerifyStep:
    raise HearthError("executor_failed", "as asked")


def test_what_follows_a_round_is_queued_ahead_where_its_rows_stay() -> None:
    runtime, proposer = make(lambda _: 1, steps_ahead=1)
    asked: list[int] = []
    proposer.ahead = lambda rows, *_: asked.append(len(rows))  # type: ignore[method-assign] # a spy
    runtime.admit([row([5, 6], 30)])
    drain(runtime)
    assert set(asked) == {1}
    asked.clear()
    runtime.admit([row([5, 6], 30)])
    while not asked:
        runtime.step()
    asked.clear()
    # Somebody comes, and has a prompt to be read.
    runtime.admit([row(list(range(40)), 4)])
    runtime.step()
    assert not asked


POISON = 285
"""A token of no text; its embedding is made NaN, and with it its keys and values in all layers."""
PROMPTS = ([3, 9, 4], [7, 8, 9, 10, 11], [5])
Texts = dict[int, list[int]]


def request(tokens: int) -> GenerationRequest:
    options = RequestOptions(temperature=0, max_tokens=tokens, ignore_eos=True)
    return GenerationRequest(
        rows=[
            RowRequest(token_ids=prompt, prompt_length=len(prompt), options=options)
            for prompt in PROMPTS
        ]
    )


def texts(runtime: LLMInferenceRuntime, tokens: int = 30) -> Texts:
    answers = runtime.handle_request(request(tokens)).rows
    assert [answer.error for answer in answers] == [None] * len(PROMPTS)
    return {row: answer.token_ids for row, answer in enumerate(answers)}


def runtime_of(folder: Path, method: Literal["off", "eagle"]) -> LLMInferenceRuntime:
    speculation = SpeculationOptions(method=method, adaptive=False)
    options = RuntimeOptions(threads=1, max_batch=4, speculation=speculation, verify=False)
    return LLMInferenceRuntime.open(folder, options)


def poison_embedding(folder: Path) -> None:
    table = map_tensor(folder / EMBEDDING_FILE, "embedding")
    whole = np.memmap(folder / EMBEDDING_FILE, np.uint8, "r+")
    first = len(whole) - table.nbytes
    whole[first:].view(table.dtype).reshape(table.shape)[POISON] = np.nan
    whole.flush()


def assert_finite(caches: HybridCacheManager) -> None:
    for tensor in caches.kv.keys + caches.kv.values:
        assert np.isfinite(tensor.array).all()


@pytest.fixture
def folder(tmp_path: Path, dialect: str) -> Path:
    return export_with_draft("qwen3_untied", tmp_path, dialect=dialect, capacity=96)


class PoisonedProposer(LookupProposer):
    """Trees that go on as the text does; beside it `poisoned` rows have a node of `POISON`."""

    def __init__(self, device: CpuDevice, known: Texts, poisoned: set[int]) -> None:
        options = SpeculationOptions(lookup_tokens=3)
        super().__init__(device.tree_ops, options, fixed_width=False)
        self._known, self._poisoned = known, poisoned

    def ready(self, _rows: Sequence[DecodingRow], _speculating: Sequence[bool]) -> bool:
        return True

    def propose(
        self, rows: Sequence[DecodingRow], speculating: Sequence[bool], trees: TreeBuffers
    ) -> list[int]:
        ids = np.zeros((len(rows), 4), np.int32)
        parents = np.full((len(rows), 4), NO_NODE, np.int32)
        parents[:, 0] = -1
        for place, row in enumerate(rows):
            if speculating[place]:
                given = len(row.token_ids) - row.prompt_length
                right = [*self._known[row.number], 0, 0][given : given + 2]
                ids[place, 1:] = [POISON if row.number in self._poisoned else 12, *right]
                parents[place, 1:] = [0, 0, 2]
        self._ops.upload_tree(trees, ids, parents)
        return [4 if wanted else 1 for wanted in speculating]


@pytest.mark.parametrize("poisoned", [{1}, {0, 2}, {0, 1, 2}])
def test_a_rejected_node_spoils_no_text(folder: Path, poisoned: set[int]) -> None:
    with closing(runtime_of(folder, "off")) as plain:
        known = texts(plain)
    assert POISON not in {token for text in known.values() for token in text}
    poison_embedding(folder)
    options = RuntimeOptions(speculation=SpeculationOptions(method="eagle"), verify=False)
    device = CpuDevice()
    parts = assemble(load_deployment(folder, options), folder, EngineOptions(threads=1), device)
    assert parts.speculation is not None
    proposer = PoisonedProposer(device, known, poisoned)
    trees = parts.speculation._trees
    strategy = SpeculativeStrategy(parts.runner, parts.sampler, trees, proposer, None)
    runtime = LLMInferenceRuntime(parts.runner, device, parts.sampler, strategy)
    with closing(runtime):
        for _ in range(2):
            assert texts(runtime) == known
            runtime._clear("look")
            assert_finite(runtime._runner.get_kv_cache())
    # The other rows go on to speculate.
    assert (strategy.metrics.accept_length > 2.5) == (len(poisoned) < len(PROMPTS))


@pytest.fixture
def drafting(folder: Path) -> Iterator[LLMInferenceRuntime]:
    with closing(runtime_of(folder, "eagle")) as runtime:
        yield runtime


def draft_caches(runtime: LLMInferenceRuntime) -> HybridCacheManager:
    assert runtime._speculation is not None
    proposer = runtime._speculation.proposer
    assert isinstance(proposer, EagleProposer)
    return proposer._draft.caches


def test_a_poisoned_draft_recovers(drafting: LLMInferenceRuntime) -> None:
    known = texts(drafting, 60)
    rounds = drafting.speculation_metrics.rounds
    caches = draft_caches(drafting)
    for tensor in caches.kv.keys + caches.kv.values:
        tensor.array[...] = np.nan
    for _ in range(2):
        assert texts(drafting, 60) == known
    # Row 3 of the cache was in no batch.
    for tensor in caches.kv.keys + caches.kv.values:
        assert np.isfinite(tensor.array[:3]).all()
    before = drafting.speculation_metrics.rounds
    assert texts(drafting, 60) == known
    assert drafting.speculation_metrics.rounds - before == rounds


def test_a_draft_that_only_misses_keeps_its_numbers(
    drafting: LLMInferenceRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[bool] = []
    caches = draft_caches(drafting)
    finite = caches.finite

    def look(row: int) -> bool:
        looked.append(finite(row))
        return looked[-1]

    monkeypatch.setattr(caches, "finite", look)
    monkeypatch.setattr(caches, "zero_row", lambda row: pytest.fail(f"row {row} is healthy"))
    texts(drafting, 60)
    assert looked
    assert all(looked)
