from pathlib import Path

import pytest
from msgspec import structs

from hearth.bench.spec import command
from hearth.bench.spec.command import (
    ALL_CASES,
    VERIFY_SHAPES,
    Prompt,
    Turn,
    encode_prompts,
    held_out_prompts,
    prefix_of,
    shape_name,
    spec_cases,
    spread,
    verified_shapes,
)
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.simulated_engine import simulated_config
from hearth.runtime.text import Tokenizer
from tests.runtime.text.folders import byte_level, open_tokenizer


@pytest.mark.parametrize("prefix", ["cpu", "kernels", "ort-cuda", "tensorrt"])
def test_each_engine_has_the_draft_s_batches_lookup_and_a_mixed_batch(prefix: str) -> None:
    cases = spec_cases(prefix)
    assert list(cases) == [
        *(f"{prefix}/b{batch}" for batch in (1, 2, 4, 8)),
        "lookup/b1",
        "lookup/b8",
        "mixed/b8",
    ]
    assert set(cases) <= set(ALL_CASES)
    assert {case.kind for case in cases.values()} == {"eagle", "lookup", "mixed"}
    assert all(name.endswith(f"/b{case.batch}") for name, case in cases.items())


def test_cases_are_named_after_what_runs_the_engine() -> None:
    cpu = simulated_config()
    cuda = structs.replace(cpu, device="cuda", backend="onnxruntime")
    assert [prefix_of(one) for one in (cpu, cuda)] == ["cpu", "ort-cuda"]
    for backend in ("kernels", "tensorrt"):
        assert prefix_of(structs.replace(cuda, backend=backend)) == backend


def test_the_verified_shapes_are_those_of_the_plan() -> None:
    assert [shape_name(one) for one in VERIFY_SHAPES] == ["10-6-60", "4-3-16", "1-4-5", "8-1-9"]


def test_an_engine_of_chains_is_verified_with_chains() -> None:
    config = structs.replace(simulated_config(), enable_eagle_spec_decode=True)
    assert verified_shapes(config) == VERIFY_SHAPES
    chains = verified_shapes(structs.replace(config, chains_only=True))
    assert [shape_name(one) for one in chains] == ["1-4-5"]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return open_tokenizer(tmp_path, byte_level())


def prompt(group: str) -> Prompt:
    return Prompt(group, [Turn("user", group)])


def test_prompts_are_conversations_that_end_with_a_question() -> None:
    found = held_out_prompts(24)
    assert len(found) == 24
    assert len({one.group for one in found}) > 5
    for one in found:
        assert one.messages[-1].role == "user"


def test_prompts_are_taken_at_even_distances() -> None:
    groups = [prompt(str(number)) for number in range(10)]
    assert [one.group for one in spread(groups, 4)] == ["0", "2", "5", "7"]
    assert spread(groups, 99) == groups


def test_prompts_get_the_chat_template(tokenizer: Tokenizer) -> None:
    (found,) = encode_prompts([prompt("hi")], tokenizer)
    assert found == tokenizer.encode_chat([("user", "hi")])


def test_without_the_program_the_place_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "SOURCE", tmp_path / "models" / "home")
    with pytest.raises(HearthError, match="no prompts at"):
        held_out_prompts(1)
