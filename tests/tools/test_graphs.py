from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.options import RuntimeOptions, SpeculationOptions
from tests.bench.running import run
from tests.references import reference_folder
from tools.graphs import GraphRun, graphs
from tools.hops import Call, Turn, figures, profile_turn, steady_turn


@pytest.fixture
def runtime(toy: Path) -> Iterator[LLMInferenceRuntime]:
    opened = LLMInferenceRuntime.open(toy, RuntimeOptions(threads=1, max_batch=3, capacity=256))
    yield opened
    opened.close()


def test_decode_steps_come_from_graphs_whatever_happens(runtime: LLMInferenceRuntime) -> None:
    seen: list[tuple[int, int]] = []
    found = GraphRun(runtime, (1, 2, 3)).run(12, lambda *progress: seen.append(progress))
    assert seen[-1] == (12, 12)
    assert found.decode_steps == found.hits > 100
    assert found.hit_rate == 1
    assert found.prefill_steps > 0
    assert found.joins > 0
    assert found.leaves > 0
    assert found.cancels > 0
    assert (found.padded, found.verify_steps) == (0, 0)
    assert found.batch_sizes == [1, 2, 3]
    assert (found.prompt_captures, found.prefill_hits) == (0, 0)
    assert 0 < found.prefill_host_ms <= found.prefill_ms
    assert 0 < found.decode_host_ms <= found.decode_ms


def test_chunks_of_prompts_from_graphs_are_counted(
    toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hearth.runtime.tensors.profiles.captured_widths", lambda _: (32,))
    with closing(LLMInferenceRuntime.open(toy, RuntimeOptions(threads=1, max_batch=3))) as opened:
        found = GraphRun(opened, (1, 2, 3)).run(12, lambda *_: None)
    assert found.prompt_captures == 3
    assert 0 < found.prefill_hits < found.prefill_steps
    assert (found.hit_rate, found.misses) == (1, 0)


def test_steps_without_a_graph_are_counted(
    runtime: LLMInferenceRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "capture", lambda _: None)
    found = GraphRun(runtime, (1, 3)).run(8, lambda *_: None)
    assert (found.hits, found.hit_rate) == (0, 0)
    assert found.misses == found.decode_steps > 0
    assert (found.padded > 0) == (2 in found.batch_sizes)


def test_the_same_seed_gives_the_same_run(
    runtime: LLMInferenceRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Else chunks are as long as the machine is quick.
    monkeypatch.setattr("hearth.runtime.generation.prefill_budget.PrefillBudget.tokens", 64)
    first, second = (GraphRun(runtime, (1, 2, 3), seed=7).run(4, lambda *_: None) for _ in "ab")
    assert (first.decode_steps, first.cancels) == (second.decode_steps, second.cancels)


def test_steps_that_verify_trees_count_too(toy: Path) -> None:
    speculation = SpeculationOptions(method="lookup", adaptive=False)
    options = RuntimeOptions(threads=1, max_batch=3, capacity=256, speculation=speculation)
    with closing(LLMInferenceRuntime.open(toy, options)) as opened:
        found = GraphRun(opened, (1, 2, 3)).run(8, lambda *_: None)
    assert found.hit_rate == 1
    assert 0 < found.verify_steps < found.decode_steps


@pytest.mark.parametrize("flags", [(), ("--speculation",)])
def test_the_command_judges(toy: Path, flags: tuple[str, ...]) -> None:
    code, figures = run("--requests", "4", "--engine", str(toy), *flags, command=graphs)
    assert (code, figures["hit_rate"], figures["requests"]) == (0, 1, 4)


def test_the_steady_turn_is_the_most_common_one() -> None:
    first = Turn(step=[Call("a.py", "warm_up")] * 9)
    steady = Turn(step=[Call("a.py", "step")], rest=[Call("b.py", "tell")])
    report = Turn(step=[Call("a.py", "step")], rest=[Call("b.py", "report")] * 4)
    assert steady_turn([first, steady, report, steady]) is steady


def test_a_turn_begins_with_its_step_and_ends_before_the_next() -> None:
    turn = profile_turn(reference_folder("qwen3"))
    functions = [call.function for call in turn.step]
    assert functions[0] == "step"
    assert functions.count("step") == functions.count("launch") == 1
    assert "_tell" in {call.function for call in turn.rest}
    assert (turn.frames[0].function, turn.frames[-1].function) == ("run", "launch")
    counted = figures(turn)
    assert counted["calls"] == len(turn.step) < counted["turn_calls"]
    assert counted["files"] < counted["turn_files"]
