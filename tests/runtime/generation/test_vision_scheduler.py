"""A vision tower between the steps of rows, on a device that is as far ahead as a GPU."""

from pathlib import Path

import numpy as np
import pytest

from hearth.runtime.device.cpu.cpu_device import CpuDevice
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.engine import EngineOptions
from hearth.runtime.executor.simulated_engine import simulated_config
from hearth.runtime.generation.assembly import assemble
from hearth.runtime.generation.batch_runtime import StepResult
from hearth.runtime.generation.deployment import DeploymentConfig
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.generation.step_times import StepTimes
from hearth.runtime.generation.vision_scheduler import TowerResult, TowerWork, VisionBudget
from hearth.runtime.images import ImageLayout
from hearth.runtime.request import RequestOptions, RowRequest
from tests.runtime.vision.tower_config import FakeTower, config_of, expected, fake_runner, outputs

TOWER = config_of(
    "qwen3_vl", position_side=4, patch_size=2, max_patches=48, hidden_size=16,
    deepstack_layers=(0,),
)  # fmt: skip


def make(ahead: int, budget: float = 1.0) -> tuple[LLMInferenceRuntime, FakeTower]:
    device = CpuDevice()
    device.steps_ahead = ahead
    config = simulated_config(max_batch=4, capacity=64)
    parts = assemble(DeploymentConfig(config), Path(), EngineOptions(), device)
    tower, engine = fake_runner(TOWER)
    return LLMInferenceRuntime(parts._replace(tower=tower), budget), engine


def work(number: int, *grid: int) -> TowerWork:
    time, height, width = grid
    patches = time * height * width
    layout = ImageLayout(height=0, width=0, grid=(time, height, width), tokens=patches // 4)
    rng = np.random.default_rng(number)
    noise = rng.integers(0, 256, (patches, TOWER.patch_bytes), np.uint8)
    out = np.full((outputs(TOWER), layout.tokens, TOWER.output_size), np.nan, np.float32)
    return TowerWork(number, layout, noise, out)


def row(tokens: int) -> RowRequest:
    options = RequestOptions(max_tokens=tokens, ignore_eos=True)
    return RowRequest(token_ids=[1, 2], prompt_length=2, options=options)


def drain(runtime: LLMInferenceRuntime) -> tuple[list[StepResult], list[TowerResult]]:
    steps = []
    while runtime.active:
        steps.append(runtime.step())
    return steps, [one for step in steps for one in step.pictures]


def assert_right(*works: TowerWork) -> None:
    for one in works:
        assert np.allclose(one.out, expected(one.patches, one.layout, TOWER))


@pytest.mark.parametrize("ahead", [0, 1])
def test_pictures_are_encoded_where_no_row_runs(ahead: int) -> None:
    runtime, engine = make(ahead)
    works = [work(7, 1, 4, 4), work(8, 1, 2, 4), work(9, 3, 4, 4)]
    for one in works:
        runtime.run_tower(one)
    steps, done = drain(runtime)
    assert [step.kind for step in steps] == ["tower"] * 3
    assert engine.calls == [24, 32, 16]
    assert [(one.number, one.error) for one in done] == [(7, None), (8, None), (9, None)]
    assert all(one.engine_s > 0 for one in done)
    assert_right(*works)
    metrics = runtime.get_multimodal_metrics()
    assert metrics.encoded == 3
    assert metrics.encode_seconds == pytest.approx(sum(one.engine_s for one in done))


@pytest.mark.parametrize("ahead", [0, 1])
def test_rows_that_decode_get_the_tokens_that_they_get_without_a_tower(ahead: int) -> None:
    runtime, _ = make(ahead)
    runtime.admit([row(12)])
    alone = [token.token_id for step in drain(runtime)[0] for token in step.tokens]
    runtime.admit([row(12)])
    steps = [runtime.step(), runtime.step()]
    works = [work(1, 4, 4, 4), work(2, 1, 4, 4)]
    for one in works:
        runtime.run_tower(one)
    steps += drain(runtime)[0]
    assert [token.token_id for step in steps for token in step.tokens] == alone
    assert_right(*works)
    # Two calls of the tower never follow each other while the row decodes.
    kinds = "".join(step.kind[0] for step in steps).rstrip("t")
    assert "tt" not in kinds
    assert "t" in kinds


def test_the_tower_and_chunks_of_prompt_take_turns() -> None:
    runtime, _ = make(0)
    runtime.run_tower(work(1, 8, 4, 4))
    prompt = RowRequest(token_ids=[1] * 40, prompt_length=40, options=RequestOptions(max_tokens=1))
    runtime.admit([prompt])
    runtime._prompts._chunk = 10
    kinds = [step.kind for step in drain(runtime)[0]]
    assert kinds == ["tower", "prefill"] * 4


def test_who_asks_whose_turn_it_is_takes_none() -> None:
    turns = make(0)[0]._vision
    turns.add(work(1, 8, 4, 4))
    turns.collect(turns.queue(decoding=False), 0.0)
    assert [turns.due(decoding=False, joining=True) for _ in range(3)] == [False] * 3
    turns.passed()
    assert turns.due(decoding=False, joining=True)


def test_a_call_that_fails_over_two_pictures_is_repeated_for_each() -> None:
    runtime, engine = make(1)
    bad, good = work(1, 1, 4, 4), work(2, 1, 4, 4)
    run = engine.run

    def fails(bindings: object, stream: object) -> None:
        run(bindings, stream)  # type: ignore[arg-type]
        patches = next(one for one in bindings if one.name == "patches")  # type: ignore[attr-defined]
        if (patches.tensor.view(patches.shape)[:16] == bad.patches).all():
            raise HearthError("executor_failed", "as asked")

    engine.run = fails  # type: ignore[assignment, method-assign]
    runtime.run_tower(bad)
    runtime.run_tower(good)
    _, done = drain(runtime)
    assert [(one.number, one.error and one.error.code) for one in done] == [
        (1, "executor_failed"),
        (2, None),
    ]
    assert_right(good)


def test_a_picture_that_no_call_takes_is_refused() -> None:
    runtime, _ = make(1)
    with pytest.raises(HearthError) as caught:
        runtime.run_tower(work(1, 1, 10, 10))
    assert caught.value.code == "image_too_large"
    assert not runtime.active


def test_without_a_tower_none_runs() -> None:
    device = CpuDevice()
    parts = assemble(DeploymentConfig(simulated_config()), Path(), EngineOptions(), device)
    with pytest.raises(HearthError) as caught:
        LLMInferenceRuntime(parts).run_tower(work(1, 1, 4, 4))
    assert caught.value.code == "internal"


def test_the_budget_lets_decode_steps_pay_for_a_call() -> None:
    times = StepTimes()
    budget = VisionBudget(0.5, times)

    def decode() -> None:
        times.decode_s.add(0.010)
        times.generation.record(1, 0.010)

    assert budget.patches(100) == 100
    for _ in range(50):
        decode()
    budget.record(1000, 0.100)
    # 100 ms at half a decode step of 10 ms each; the last step may be paid later.
    paid = []
    for _ in range(25):
        paid.append(budget.paid)
        decode()
    assert paid.index(True) in {19, 20}
    # 0.1 ms a patch, 5 ms a step.
    assert budget.patches(1000) in {49, 50}
    assert budget.patches(20) == 20
