"""Speculation on a GPU: the text of plain decoding, captured steps; by kernels the same bits."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec import structs

from hearth.runtime.device.cuda.ops import CudaStepOps
from hearth.runtime.export import DraftOptions, ExportOptions, export_model
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.options import EagleDraftingConfig, RuntimeOptions, SpeculationOptions
from hearth.runtime.request import GeneratedRow, GenerationRequest, RequestOptions, RowRequest
from hearth.runtime.text.tokenizer import Tokenizer
from models.splits import held_out
from tests.gpu.conftest import CAPACITY, CHAINED, DRAFT, DRAFTED, MODEL, EngineFolder
from tests.gpu.near_ties import Reference, divergences, greedy_row, references
from tests.peft_models import write_peft

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

NEAR_TIE = 0.1
PROMPTS = 20
LARGEST_TREE = 60
CASES = [
    *((name, "eagle", shape) for name in DRAFTED for shape in ((4, 3, 16), (10, 6, 60))),
    *((name, "eagle", (1, 6, 7)) for name in ("kernels-eagle-fp16", "ort-eagle-fp16", *CHAINED)),
    ("kernels-fp16", "lookup", None),
    ("ort-fp16", "lookup", None),
    ("tensorrt-eagle", "eagle", None),
]


class Speculating(NamedTuple):
    """A runtime that speculates, rows, and what they get without."""

    runtime: LLMInferenceRuntime
    rows: list[RowRequest]
    plain: list[Reference]


@pytest.fixture(scope="module", params=CASES, ids=str)
def speculating(
    request: pytest.FixtureRequest, engine_folder: EngineFolder
) -> Iterator[Speculating]:
    name, method, shape = request.param
    folder = engine_folder(name)
    tokenizer = Tokenizer.open(folder)
    rows = [
        greedy_row(
            tokenizer.encode_pairs([(one["role"], one["content"]) for one in prompt.messages]),
            20 + 4 * place,
        )
        for place, prompt in enumerate(held_out()[:: 1200 // PROMPTS][:PROMPTS])
    ]
    with closing(LLMInferenceRuntime.open(folder, RuntimeOptions())) as plain:
        longest = max(len(row.token_ids) + (row.options.max_tokens or 0) for row in rows)
        assert longest + LARGEST_TREE <= plain.capacity, "rounds need room behind every row"
        plain.capture([plain.max_batch])
        wanted = references(plain, rows)
    eagle = None
    if shape is not None:
        top_k, step, nodes = shape
        eagle = EagleDraftingConfig(
            drafting_top_k=top_k, drafting_step=step, verify_tree_size=nodes
        )
    options = SpeculationOptions(method=method, eagle=eagle, adaptive=False)
    with closing(LLMInferenceRuntime.open(folder, RuntimeOptions(speculation=options))) as runtime:
        assert "captured" not in " ".join(runtime.capture(range(1, runtime.max_batch + 1)))
        yield Speculating(runtime, rows, wanted)


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_greedy_tokens_are_those_of_plain_decoding(speculating: Speculating, batch: int) -> None:
    runtime, rows, plain = speculating
    before = structs.replace(runtime.speculation_metrics)
    tokens = []
    for first in range(0, len(rows), batch):
        request = GenerationRequest(rows=rows[first : first + batch])
        tokens += [row.token_ids for row in runtime.handle_request(request).rows]
    parted = divergences(tokens, plain)
    metrics = runtime.speculation_metrics
    length = (metrics.accepted - before.accepted) / (metrics.rounds - before.rounds)
    print("divergences", parted, "accept length", round(length, 2))  # noqa: T201 - reported with the figures of the run
    assert [one for one in parted if one.lead >= NEAR_TIE] == []
    assert length > 1.5


def test_rows_of_both_kinds_share_a_batch(speculating: Speculating) -> None:
    runtime, rows, plain = speculating
    mixed = [
        structs.replace(row, options=structs.replace(row.options, speculation=place % 2 == 0))
        for place, row in enumerate(rows[:8])
    ]
    found = runtime.handle_request(GenerationRequest(rows=mixed)).rows
    parted = divergences([row.token_ids for row in found], plain[:8])
    assert [one for one in parted if one.lead >= NEAR_TIE] == []


@pytest.mark.whole_gpu
def test_all_but_chunks_of_several_rows_is_captured(speculating: Speculating) -> None:
    runtime, rows, _ = speculating
    before, prompts = structs.replace(runtime.counters), structs.replace(runtime.prompt_graphs)
    runtime.handle_request(GenerationRequest(rows=rows[:5]))
    missed = runtime.prompt_graphs.misses - prompts.misses
    assert runtime.counters.misses - before.misses == missed
    assert runtime.counters.hits > before.hits
    assert runtime.counters.fallbacks == before.fallbacks


TREE_PROMPTS = 16
SHAPES = [("eagle", (4, 3, 16)), ("eagle", (10, 6, 60)), ("eagle", (1, 7, 8)), ("lookup", None)]
SAMPLED = RequestOptions(temperature=0.9, top_p=0.95, top_k=50, logprobs=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("engines") / "kernels"
    options = ExportOptions(
        backend="kernels",
        device="cuda",
        dtype="float16",
        capacity=CAPACITY,
        max_lora_rank=16,
        draft=DraftOptions(folder=DRAFT),
    )
    export_model(MODEL, target, options)
    return target


@pytest.fixture(scope="module")
def rows(folder: Path) -> list[RowRequest]:
    """Greedy ones and drawn ones in turn, of different lengths."""
    tokenizer, made = Tokenizer.open(folder), []
    for place, prompt in enumerate(held_out()[:: 1200 // TREE_PROMPTS][:TREE_PROMPTS]):
        ids = tokenizer.encode_pairs([(one["role"], one["content"]) for one in prompt.messages])
        options = SAMPLED if place % 2 else RequestOptions(temperature=0, logprobs=1)
        options = structs.replace(options, max_tokens=20 + 4 * place, seed=place)
        made.append(RowRequest(token_ids=ids, prompt_length=len(ids), options=options))
    return made


@pytest.fixture(scope="module")
def plain(folder: Path, rows: list[RowRequest]) -> list[Any]:
    """What each row gets alone, without speculation."""
    with closing(LLMInferenceRuntime.open(folder, RuntimeOptions())) as runtime:
        runtime.capture([1])
        return [replies(runtime, [row])[0] for row in rows]


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def runtime(request: pytest.FixtureRequest, folder: Path) -> Iterator[LLMInferenceRuntime]:
    method, shape = request.param
    eagle = None
    if shape is not None:
        top_k, step, nodes = shape
        eagle = EagleDraftingConfig(
            drafting_top_k=top_k, drafting_step=step, verify_tree_size=nodes
        )
    options = SpeculationOptions(method=method, eagle=eagle, adaptive=False)
    with closing(LLMInferenceRuntime.open(folder, RuntimeOptions(speculation=options))) as made:
        print(request.param, made.capture(range(1, made.max_batch + 1)))  # noqa: T201 - reported with the run
        assert made.counters.failed_captures == 0, made.counters.failure
        yield made


def replies(runtime: LLMInferenceRuntime, rows: list[RowRequest]) -> list[Any]:
    found: list[GeneratedRow] = runtime.handle_request(GenerationRequest(rows=rows)).rows
    assert [row.error for row in found] == [None] * len(rows)
    return [(row.token_ids, row.logprobs) for row in found]


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_replies_are_those_of_plain_decoding(
    runtime: LLMInferenceRuntime, rows: list[RowRequest], plain: list[Any], batch: int
) -> None:
    before = structs.replace(runtime.speculation_metrics)
    found: list[Any] = []
    for first in range(0, len(rows), batch):
        found += replies(runtime, rows[first : first + batch])
    metrics = runtime.speculation_metrics
    rounds = metrics.rounds - before.rounds
    print("rounds", rounds, "length", (metrics.accepted - before.accepted) / max(1, rounds))  # noqa: T201 - reported with the run
    parted = [
        (row, next((i for i, (a, b) in enumerate(zip(one[0], other[0])) if a != b), "end"))  # noqa: B905 - the shorter ends it
        for row, (one, other) in enumerate(zip(found, plain, strict=True))
        if one[0] != other[0]
    ]
    assert parted == []
    assert found == plain
    assert rounds > 0


def test_most_proposals_are_queued_before_the_paths_are_known(
    runtime: LLMInferenceRuntime, rows: list[RowRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []
    inner = CudaStepOps.put_entries

    def put_entries(ops: CudaStepOps, *entries: Any, **filled: Any) -> None:
        given.append(len(entries[1]))
        inner(ops, *entries, **filled)

    monkeypatch.setattr(CudaStepOps, "put_entries", put_entries)
    before, alone = runtime.speculation_metrics.rounds, rows[-1:]
    replies(runtime, alone)
    rounds = runtime.speculation_metrics.rounds - before
    assert not given or len(given) <= rounds // 2, (len(given), rounds)


def test_rows_of_both_kinds_share_a_batch_of_kernels(
    runtime: LLMInferenceRuntime, rows: list[RowRequest], plain: list[Any]
) -> None:
    mixed = [
        structs.replace(row, options=structs.replace(row.options, speculation=place % 3 == 0))
        for place, row in enumerate(rows[:8])
    ]
    assert replies(runtime, mixed) == plain[:8]


def test_an_adapter_speculates_as_it_decodes(
    runtime: LLMInferenceRuntime, folder: Path, rows: list[RowRequest], tmp_path: Path
) -> None:
    for seed, rank in enumerate((16, 5)):
        write_peft(MODEL, tmp_path / f"{rank}", rank=rank, alpha=2 * rank, seed=seed)
    wanted = {}
    with closing(LLMInferenceRuntime.open(folder, RuntimeOptions())) as alone:
        for name in ("16", "5"):
            alone.load_adapter(name, tmp_path / name)
            wanted[name] = [replies(alone, [with_adapter(row, name)])[0] for row in rows[:4]]
    assert wanted["16"] != wanted["5"]
    for name in ("16", "5"):
        runtime.load_adapter(name, tmp_path / name)
    for name in ("16", "5", "16"):
        assert replies(runtime, [with_adapter(row, name) for row in rows[:4]]) == wanted[name]
    for name in ("16", "5"):
        runtime.unload_adapter(name)


def with_adapter(row: RowRequest, name: str) -> RowRequest:
    return structs.replace(row, options=structs.replace(row.options, adapter=name))
