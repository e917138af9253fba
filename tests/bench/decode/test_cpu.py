from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from hearth.bench.decode import cpu
from hearth.bench.decode.cases import CASES, Artifacts
from hearth.bench.decode.contest import PROMPT_TOKENS, prompt_ids
from hearth.bench.decode.cpu import DecodeFigures, Plan, common_prefix, decode_figures

SIZE = 1 << 30


def figures(seconds: dict[str, list[float]]) -> DecodeFigures:
    return decode_figures(
        {"floor": [0.05, 0.04, 0.06, 0.05, 0.05, 0.045], **seconds},
        weight_bytes=SIZE,
        tokens={"hearth": [1, 2, 3], "llama_cpp": [1, 2, 4]},
        precision="float32",
        notes=["one"],
    )


def test_figures_are_medians_and_the_best_floor() -> None:
    found = figures(
        {
            "hearth": [0.05, 0.04, 9.0],
            "transformers": [0.1, 0.2, 0.1],
            "llama_cpp": [0.04, 0.04, 0.0],
        }
    )
    assert found.tokens_per_s == pytest.approx(20)
    assert found.step_ms == pytest.approx(50)
    assert found.floor_share == pytest.approx(0.8)
    assert found.plain_read_share == pytest.approx(0.9)
    assert found.floor_gb_per_s == pytest.approx(SIZE / 0.04 / 1e9)
    assert found.vs_transformers == pytest.approx(2.0)
    assert found.vs_llama_cpp == pytest.approx(0.8)
    assert found.same_tokens == {"llama_cpp": 2}
    assert found.credible


def test_a_missing_peer_has_no_ratio() -> None:
    found = figures({"hearth": [0.05]})
    assert found.vs_transformers is found.vs_llama_cpp is found.llama_cpp_ms is None
    assert found.notes == ["one"]


@pytest.mark.parametrize(("step", "credible"), [(0.0393, True), (0.0391, False)])
def test_a_step_faster_than_memory_is_not_believed(step: float, credible: bool) -> None:  # noqa: FBT001 - a parameter of the test
    assert figures({"hearth": [step]}).credible is credible


def test_a_small_buffer_is_read_several_times_a_pass() -> None:
    found = decode_figures(
        {"hearth": [0.01], "floor": [0.256] * 3},
        weight_bytes=1 << 20,
        tokens={},
        precision="",
        notes=[],
    )
    assert found.floor_ms == pytest.approx(1.0)


@given(st.lists(st.integers()), st.lists(st.integers()), st.lists(st.integers()))
def test_the_common_prefix_is_common(shared: list[int], one: list[int], other: list[int]) -> None:
    length = common_prefix(shared + one, shared + other)
    assert length >= len(shared)
    assert (shared + one)[:length] == (shared + other)[:length]


def test_everyone_gets_the_same_prompt_and_room_for_all_steps() -> None:
    artifacts = Artifacts(source=Path("a"), engine=Path("b"), gguf=Path("c"), weight_bytes=9)
    plan = Plan(threads=2, spin=True, precision="int8")
    jobs = cpu._jobs(CASES["0.6b/int4"], artifacts, plan, 143)
    assert list(jobs) == ["hearth", "transformers", "llama_cpp", "floor"]
    assert {tuple(job.prompt) for job in jobs.values()} == {tuple(prompt_ids())}
    assert {(job.threads, job.steps) for job in jobs.values()} == {(2, 143)}
    assert len(prompt_ids()) == PROMPT_TOKENS
    assert (jobs["transformers"].precision, jobs["hearth"].spin) == ("int8", True)
    exact = cpu._jobs(CASES["0.6b/fp32"], structs.replace(artifacts, gguf=None), plan, 1)
    assert list(exact) == ["hearth", "transformers", "floor"]
    assert exact["transformers"].precision == "float32"
