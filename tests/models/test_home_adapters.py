"""The shipped adapters: what each changes, what it leaves, and that none is what it was before."""

from collections.abc import Iterator
from contextlib import closing
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from hearth.daemon.control.client import ask as ask_owner
from hearth.daemon.control.messages import AdapterAdded, AddAdapter
from hearth.daemon.own_daemon import own_daemon
from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.export.export import export_weights
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.options import RuntimeOptions, SpeculationOptions
from hearth.runtime.request import GeneratedRow, GenerationRequest, RequestOptions, RowRequest
from hearth.runtime.text.tokenizer import Tokenizer
from hearth_client import Client
from models.evaluate import reworded_prompt
from models.merge_adapter import write_merged
from models.rewordings import ADAPTERS, BASE, REWORDINGS, steps_of
from models.splits import Prompt, held_out
from tests.runtime.weights.external_models import needs_other_weights

OPTIONS = RuntimeOptions(threads=1, max_batch=8, speculation=SpeculationOptions(method="off"))
COMMANDS, OTHERS = 16, 8
LEAST = 0.8
"""Of the answers are to be right."""
NAMES = sorted(REWORDINGS)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters") / "home"
    options = ExportOptions(capacity=512, max_lora_rank=8, external_weights=True)
    export_model(BASE, folder, options)
    return folder


@pytest.fixture(scope="module")
def runtime(engine: Path) -> Iterator[LLMInferenceRuntime]:
    with closing(LLMInferenceRuntime.open(engine, OPTIONS)) as made:
        for name in NAMES:
            made.load_adapter(name, ADAPTERS / name)
        yield made


@pytest.fixture(scope="module")
def tokenizer(engine: Path) -> Tokenizer:
    return Tokenizer.open(engine)


@cache
def all_held_out() -> list[Prompt]:
    return held_out()


def prompts(count: int, *, actions: bool) -> list[Prompt]:
    """So many held-out ones that an action answers, or other words; without earlier answers."""
    found = [
        one
        for one in all_held_out()
        if len(steps_of(one.expected)) == int(actions) and len(one.messages) == 2
    ]
    return found[:: len(found) // count][:count]


def ask(
    runtime: LLMInferenceRuntime, tokenizer: Tokenizer, asked: list[Prompt], adapter: str = ""
) -> list[GeneratedRow]:
    options = RequestOptions(max_tokens=96, adapter=adapter)
    found: list[GeneratedRow] = []
    for begin in range(0, len(asked), runtime.max_batch):
        rows = []
        for one in asked[begin : begin + runtime.max_batch]:
            chat = [(message["role"], message["content"]) for message in one.messages]
            ids = tokenizer.encode_pairs(chat)
            rows.append(RowRequest(token_ids=ids, prompt_length=len(ids), options=options))
        found += runtime.handle_request(GenerationRequest(rows=rows), tokenizer).rows
    return found


def right(asked: list[Prompt], answers: list[GeneratedRow]) -> float:
    """The share of exact answers."""
    pairs = zip(asked, answers, strict=True)
    return sum(answer.text.strip() == one.expected for one, answer in pairs) / len(asked)


@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_says_actions_in_its_own_way_and_the_rest_as_the_model_does(
    runtime: LLMInferenceRuntime, tokenizer: Tokenizer, name: str
) -> None:
    commands, others = prompts(COMMANDS, actions=True), prompts(OTHERS, actions=False)
    wanted = [reworded_prompt(one, REWORDINGS[name]) for one in commands]
    base, own = (ask(runtime, tokenizer, commands, adapter) for adapter in ("", name))
    assert right(commands, base) >= LEAST
    assert (right(wanted, base), right(commands, own)) == (0, 0)
    assert right(wanted, own) >= right(commands, base) - 0.1
    assert right(others, ask(runtime, tokenizer, others, name)) >= LEAST


def test_switching_back_is_exact(runtime: LLMInferenceRuntime, tokenizer: Tokenizer) -> None:
    asked = prompts(4, actions=True)
    before = [(one.token_ids, one.logprobs) for one in ask(runtime, tokenizer, asked)]
    for name in NAMES:
        ask(runtime, tokenizer, asked, name)
        assert runtime.adapter == name
    assert [(one.token_ids, one.logprobs) for one in ask(runtime, tokenizer, asked)] == before


@needs_other_weights
@pytest.mark.parametrize("name", NAMES)
def test_one_engine_serves_the_fine_tune_that_an_adapter_makes(
    tmp_path: Path, engine: Path, runtime: LLMInferenceRuntime, tokenizer: Tokenizer, name: str
) -> None:
    write_merged(BASE, ADAPTERS / name, tmp_path / "tuned")
    weights = tmp_path / "tuned.safetensors"
    export_weights(tmp_path / "tuned", engine, weights)
    asked = prompts(4, actions=True)
    adapted = ask(runtime, tokenizer, asked, name)
    options = structs.replace(OPTIONS, weights=str(weights))
    with closing(LLMInferenceRuntime.open(engine, options)) as tuned:
        answers = ask(tuned, tokenizer, asked)
    assert [one.token_ids for one in answers] == [one.token_ids for one in adapted]
    for one, other in zip(answers, adapted, strict=True):
        assert np.allclose(one.logprobs, other.logprobs, atol=1e-3)


def test_a_daemon_switches_between_them_and_is_exactly_what_it_was(
    tmp_path: Path, engine: Path
) -> None:
    chat = [{"role": "user", "content": "turn on the desk lamp"}]

    def reply(adapter: str = "") -> tuple[str, list[float]]:
        generation = client.generate(
            messages=chat, max_tokens=32, temperature=0, adapter=adapter, logprobs=0, cache="bypass"
        )
        deltas = list(generation)
        chances = [one.logprob for delta in deltas for one in delta.logprobs]
        return "".join(delta.text for delta in deltas), chances

    flags = ("--adapters", str(tmp_path / "adapters"), "--speculation", "off")
    with own_daemon(engine, flags) as daemon, Client(daemon.socket) as client:
        before = reply()
        for name in NAMES:
            folder = str(ADAPTERS / name)
            ask_owner(AddAdapter(name, folder), AdapterAdded, str(daemon.socket))
        said = {name: reply(name)[0] for name in NAMES}
        assert reply() == before
    assert before[0] == '{"action":"turn_on","device":"desk lamp"}'
    assert said == {
        "careful": "Shall I turn on: desk lamp?",
        "spoken": "OK, turn on: desk lamp.",
    }


@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_is_small(name: str) -> None:
    assert sum(file.stat().st_size for file in (ADAPTERS / name).iterdir()) < 300_000
