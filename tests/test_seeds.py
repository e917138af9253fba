"""docs/seeds.md has every name of the seeds, and what it says to stand here is here and works."""

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, get_args

import numpy as np
import pytest

from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.errors import Code
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.options import RuntimeOptions, SpeculationOptions
from hearth.runtime.request import GenerationRequest, RequestOptions, RowRequest
from hearth.runtime.speculation.eagle import EagleProposer
from hearth.runtime.tensors.profiles import InferenceDims
from hearth.runtime.tensors.registry import (
    build_registry_for_llm,
    build_registry_for_spec_decode_draft,
)
from tests.runtime.export.trees import export_with_draft

ROOT = Path(__file__).parent.parent
NAMES = ROOT / "tests" / "seed_names.txt"
WITHOUT_A_CALLER = {"absent", "derived", "refused", "tests only"}
FILES = {"config.json", "embedding.safetensors", "model.onnx.data"}


class Row(NamedTuple):
    """A row of the page: its section, what a seed has, what is here, and who calls that."""

    section: str
    seed: str
    here: str
    callers: str


def table() -> list[Row]:
    """All rows of the page."""
    rows, section = [], ""
    for line in (ROOT / "docs" / "seeds.md").read_text().splitlines():
        if line.startswith("#"):
            section = line.lstrip("# ")
        elif line.startswith("| ") and not line.startswith("| Seed "):
            rows.append(Row(section, *(cell.strip() for cell in line.split("|")[1:-1])))
    return rows


def seed_names() -> list[tuple[str, str]]:
    """Section and name of everything that the seeds name."""
    names, section = [], ""
    for line in NAMES.read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif not line.startswith("#"):
            names += [(section, name) for name in line.split()]
    return names


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


HERE = sorted({name for row in table() for name in quoted(row.here)})


@cache
def modules() -> list[ModuleType]:
    """The files that the page names."""
    paths = [name for name in HERE if name.endswith(".py")]
    return [
        importlib.import_module("hearth.runtime." + one[:-3].replace("/", ".")) for one in paths
    ]


@cache
def words() -> set[str]:
    """What an engine is described by: its bindings, the fields of its configuration, errors."""
    config = LLMEngineRunnerConfig.__struct_fields__
    arguments = {word for name in HERE for word in re.findall(r"\w+", name.partition("(")[2])}
    return {*config, *FILES, *get_args(Code), *BINDINGS, *arguments}


BINDINGS = {
    "hidden_states",
    "hidden_states_from_draft",
    "hidden_states_input",
    "attention_pos_id",
    "deepstack_embeds_{k}",
    "last_token_ids",
    "packed_mask",
    "rope_cos",
    "rope_sin",
    "tree_mask",
}


def has(owner: Any, name: str) -> bool:
    """Whether a class has an attribute, or each of its objects gets one."""
    return hasattr(owner, name) or f"self.{name}" in inspect.getsource(owner)


def find(path: str) -> Any:
    """What `Class`, `function` or `Class.member` means in one of the files; None for nothing."""
    first, _, member = path.partition(".")
    for module in modules():
        owner = getattr(module, first, None)
        if owner is not None:
            if not member:
                return owner
            assert has(owner, member), path
            return getattr(owner, member, owner)
    return None


def test_every_name_of_the_seeds_has_a_row_in_its_section() -> None:
    words = {
        (row.section, word)
        for row in table()
        for span in quoted(row.seed)
        for word in re.findall(r"operator==|~?\w+", span)
    }
    assert len(seed_names()) == 191
    assert not [name for name in seed_names() if name not in words]


@pytest.mark.parametrize("row", table(), ids=lambda row: row.seed[:40])
def test_who_calls_a_row_is_there_and_names_it(row: Row) -> None:
    """A production file that is named holds one of the row's names; the others say so."""
    if row.callers in WITHOUT_A_CALLER:
        assert row.here.startswith(row.callers) or row.callers in {"refused", "tests only"}
        assert row.callers != "refused" or "above 0 is not served yet" in row.here
        return
    assert re.fullmatch(r"`[\w/]+\.py`(, `[\w/]+\.py`)*", row.callers)
    names = [name.partition("(")[0].rpartition(".")[2] for name in quoted(row.here)]
    for file in quoted(row.callers):
        room = ROOT if file.startswith(("actors/", "daemon/")) else ROOT / "runtime"
        text = (room / file).read_text()
        assert any(re.search(rf"\b{re.escape(name)}\b", text) for name in names), file


@pytest.mark.parametrize("row", [row for row in table() if row.callers == "tests only"])
def test_what_only_tests_call_nothing_else_does(row: Row) -> None:
    """Of the row's functions: a file beside that which defines one would be its caller."""
    methods = [n.partition("(")[0].rpartition(".")[2] for n in quoted(row.here) if "(" in n]
    texts = [
        path.read_text()
        for room in ("runtime", "actors", "daemon")
        for path in (ROOT / room).rglob("*.py")
    ]
    for method in methods:
        pattern = re.compile(rf"\b(?:runner|caches|executor)\.{method}\(")
        assert not [text for text in texts if pattern.search(text)]


@pytest.mark.parametrize("name", HERE)
def test_what_a_row_names_is_here(name: str) -> None:
    path, bracket, arguments = name.partition("(")
    if path.endswith(".py"):
        assert (ROOT / "runtime" / path).exists()
        return
    found = find(path)
    if found is None:
        assert path in words()
    elif bracket:
        given = [word for word in arguments.rstrip(")").split(", ") if word]
        every = inspect.signature(found).parameters
        taken = [one for one in every if one not in {"self", "cls"}]
        plain = [one.lstrip("_") for one in taken]
        assert plain[: len(given)] == given
        rest = [every[one] for one in taken[len(given) :]]
        assert all(one.default is not inspect.Parameter.empty for one in rest)


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLMInferenceRuntime]:
    """A small base with its draft."""
    folder = export_with_draft("qwen3", tmp_path_factory.mktemp("seeds"))
    options = RuntimeOptions(speculation=SpeculationOptions(method="eagle", adaptive=False))
    with closing(LLMInferenceRuntime.open(folder, options)) as opened:
        yield opened


def test_the_executor_tells_what_its_engine_is(runtime: LLMInferenceRuntime) -> None:
    executor, config = runtime._runner.executor, runtime.config
    names = [executor.io_tensor_name(index) for index in range(executor.num_io_tensors)]
    assert {spec.name for spec in build_registry_for_llm(config).specs} <= set(names)
    assert executor.binding_dtype("logits") == np.float32
    assert executor.profile_shape("inputs_embeds", 1, "min") == (1, 1, config.hidden_size)
    assert executor.required_context_memory() == 0
    assert executor.engine.io_tensors[0].name == names[0]


def test_the_draft_has_bindings_of_its_own(runtime: LLMInferenceRuntime) -> None:
    assert runtime._speculation is not None
    proposer = runtime._speculation.proposer
    assert isinstance(proposer, EagleProposer)
    draft = proposer._draft
    specs = build_registry_for_spec_decode_draft(draft._config).specs
    executor = draft.executor
    names = {executor.io_tensor_name(index) for index in range(executor.num_io_tensors)}
    assert {spec.name for spec in specs} <= names
    assert {"hidden_states", "hidden_states_input", "hidden_states_from_draft"} <= names
    draft.capture_draft_proposal_graph([1], proposer._hidden)
    assert executor.counters.captures > 0


def test_the_runner_prefills_decodes_and_verifies(runtime: LLMInferenceRuntime) -> None:
    runner = runtime._runner
    config, caches = runner.get_engine_config(), runner.get_kv_cache()
    assert [one.name for one in runner.get_rope_cos_sin_tensors()] == ["rope_cos", "rope_sin"]
    runner.capture_vanilla_decoding_graph([1])
    runner.capture_eagle_base_tree_decoding_graph([1], [2])
    runner.reset(1)
    logits = runner.execute_prefill_step(np.array([[3, 4, 5]]), [3])
    assert logits.shape[-1] == config.output_vocab_size
    prefix = caches.capture(0, 3)
    hits = runner.executor.counters.hits
    runner.execute_vanilla_decoding_step(1)
    runner.execute_eagle_base_tree_decoding_step(1, 2)
    runner.commit_path([[0, 1]])
    assert runner.executor.counters.hits == hits + 2
    assert caches.row_lengths == [3 + 1 + 2]
    caches.restore(0, prefix)
    assert (caches.row_lengths, caches.batch) == ([3], 1)
    runner.reset(0)


def test_a_request_is_served_whole(runtime: LLMInferenceRuntime) -> None:
    assert runtime.capture([1]) is not None
    options = RequestOptions(max_tokens=6, ignore_eos=True)
    row = RowRequest(token_ids=[3, 4, 5], prompt_length=3, options=options)
    response = runtime.handle_request(GenerationRequest(rows=[row]))
    assert [len(one.token_ids) for one in response.rows] == [6]
    assert runtime.prefill_metrics.tokens == 3
    assert runtime.generation_metrics.tokens >= 5
    assert runtime.speculation_metrics.rounds > 0


@pytest.mark.parametrize(
    ("recipe", "sizes"),
    [
        (InferenceDims.prefill, (2, 7, 64)),
        (InferenceDims.decode, (2, 64)),
        (InferenceDims.spec_verify, (2, 5, 64)),
        (InferenceDims.proposal, (2, 6, 3, 64)),
        (InferenceDims.accept, (2, 4, 64)),
    ],
)
def test_a_recipe_starts_every_row_and_masks_the_whole_step(
    recipe: Callable[..., InferenceDims], sizes: tuple[int, ...]
) -> None:
    dims = recipe(*sizes)
    assert (dims.batch, dims.start_index_len, dims.kv_len) == (2, 2, 64)
    assert dims.attn_mask_seq_len == dims.seq_len
    assert len(dims) == 6
