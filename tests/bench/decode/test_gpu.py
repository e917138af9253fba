"""The GPU's bench on the CPU: a toy engine, the same workers, rounds and figures."""

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from hearth.bench.contenders.contender import ContenderName, Device, Job
from hearth.bench.decode import gpu
from hearth.bench.decode.cases import GPU_CASES, GPUEngine
from hearth.bench.decode.contest import Contest
from hearth.bench.decode.gpu import GPUModels, GPUPlan, actor_step_s, measure_gpu, step_times
from hearth.bench.decode.gpu_figures import GPUFigures
from hearth.daemon.cli.errors import Failure
from tests.bench.running import hide

pytestmark = pytest.mark.slow
PLAN = GPUPlan(
    device="cpu", dtype="float32", rounds=2, steps=5, host_steps=2, floor_bytes=1 << 25, daemons=()
)


def measured(
    name: str,
    source: Path,
    folders: dict[GPUEngine, Path],
    logs: Path,
    said: list[str],
    *,
    plan: GPUPlan = PLAN,
) -> dict[str, GPUFigures]:
    contest = Contest(name, logs, said.append)
    return measure_gpu(GPU_CASES[name], GPUModels(source, folders), plan, contest)


def test_an_engine_alone_has_figures_and_the_peers_a_reason(
    toy: Path, quick_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(tmp_path, "torch", monkeypatch)
    folders: dict[GPUEngine, Path] = {"ort-cuda": toy}
    said: list[str] = []
    found = measured("0.6b/b8", quick_model, folders, tmp_path, said)
    one = found["ort-cuda"]
    assert one.tokens_per_s == pytest.approx(8000 / one.step_ms)
    assert one.host_us is one.bandwidth_share is one.actor_over_raw is None
    assert one.vs_transformers is one.vs_torch_compile is None
    assert one.raw_ms > 0
    assert [text.split(":")[0] for text in one.notes] == [
        "transformers is left out",
        "torch_compile is left out",
        "read bandwidth is left out",
    ]
    assert "0.6b/b8: round 2 of 2" in said


def test_an_engine_that_cannot_run_here_is_left_out_with_its_reason(
    toy: Path, quick_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(tmp_path, "torch", monkeypatch)
    folder = tmp_path / "engine"
    folder.mkdir()
    (folder / "config.json").write_bytes((toy / "config.json").read_bytes())
    folders: dict[GPUEngine, Path] = {"tensorrt": folder}
    said: list[str] = []
    assert measured("0.6b/b1", quick_model, folders, tmp_path, said) == {}
    assert said[0].startswith("0.6b/b1: loading tensorrt, ")
    assert said[1].startswith("0.6b/b1: tensorrt is left out: ")


def test_a_daemon_that_fails_is_noted_and_the_figures_stay(
    toy: Path, quick_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> float:
        raise Failure("it did not start")

    hide(tmp_path, "torch", monkeypatch)
    monkeypatch.setattr(gpu, "actor_step_s", fail)
    folders: dict[GPUEngine, Path] = {"ort-cuda": toy}
    plan = structs.replace(PLAN, daemons=("ort-cuda",))
    found = measured("0.6b/b1", quick_model, folders, tmp_path, [], plan=plan)
    one = found["ort-cuda"]
    assert one.step_ms > 0
    assert one.actor_ms is one.actor_over_raw is None
    assert one.notes[-1] == "ort-cuda was not measured through a daemon: it did not start"


def test_the_middle_of_the_steps_has_the_context_of_the_case() -> None:
    models = GPUModels(Path("source"), {"kernels": Path("engine")}, {"Q4_0": Path("file")})
    for name, slots in (("0.6b/b8", 256), ("0.6b/b8/1000", 2048)):
        case, plan = GPU_CASES[name], GPUPlan(peers=("llama_cpp",))
        jobs = gpu._jobs(case, models, plan)
        assert list(jobs) == ["kernels", "llama_cpp Q4_0", "read bandwidth"]
        for job in list(jobs.values())[:2]:
            first = (
                len(job.prompt) + plan.total_steps - plan.rounds * (plan.steps + plan.host_steps)
            )
            assert (first + len(job.prompt) + job.steps + 1) // 2 == case.context
            assert len(job.prompt) + job.steps < job.capacity == slots


class StepTimes:
    """A worker whose steps take 1, 2, 3, ... seconds."""

    def __init__(self, contender: ContenderName) -> None:
        self.job = Job(contender=contender)
        self.calls: list[tuple[int, float]] = []

    def advance(self, steps: int, *, pause_s: float) -> list[float]:
        self.calls.append((steps, pause_s))
        return [float(number) for number in range(1, steps + 1)]


@pytest.mark.parametrize(
    ("contender", "device", "pause", "seconds"),
    [
        ("hearth", "cuda", 0.5, [3.0, 4.0, 5.0]),
        ("hearth", "cpu", 0.0, []),
        ("torch_compile", "cuda", 0.0, []),
    ],
)
def test_only_an_engine_of_a_gpu_has_host_steps_and_all_take_as_many(
    contender: ContenderName, device: Device, pause: float, seconds: list[float]
) -> None:
    worker = StepTimes(contender)
    plan = structs.replace(PLAN, device=device, host_steps=5)
    assert gpu._host_steps(worker, plan, 0.25) == seconds  # type: ignore[arg-type] # a stand-in
    assert worker.calls == [(5, pause)]


def test_a_daemon_is_compared_with_an_engine_as_alone_as_it(
    toy: Path, quick_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(tmp_path, "torch", monkeypatch)
    folders: dict[GPUEngine, Path] = {"ort-cuda": toy}
    plan = structs.replace(PLAN, daemons=("ort-cuda",))
    jobs: list[Job] = []
    alone = gpu._alone_step_s

    def spy(job: Job, *rest: Any) -> float:
        jobs.append(job)
        return alone(job, *rest)

    monkeypatch.setattr(gpu, "_alone_step_s", spy)
    one = measured("0.6b/b1", quick_model, folders, tmp_path, [], plan=plan)["ort-cuda"]
    assert one.actor_ms is not None
    # Which has as many tokens as its rows in the middle of their steps.
    assert [len(job.prompt) + plan.steps for job in jobs] == [gpu.actor_context(toy)]
    assert one.raw_alone_ms is not None
    assert one.actor_over_raw == pytest.approx(one.actor_ms / one.raw_alone_ms)


@pytest.mark.reference
def test_a_peer_and_the_floor_are_measured_beside_it(
    toy: Path, quick_model: Path, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    folders: dict[GPUEngine, Path] = {"ort-cuda": toy}
    # The other peer is the same model with PyTorch's compiler, which has a test of its own.
    plan = structs.replace(PLAN, peers=("transformers",))
    found = measured("0.6b/b1", quick_model, folders, tmp_path, [], plan=plan)
    one = found["ort-cuda"]
    assert one.notes == []
    assert one.vs_transformers is not None
    assert one.vs_transformers == pytest.approx((one.transformers_ms or 0) / one.step_ms)
    assert one.vs_torch_compile is None
    assert one.bandwidth_share is not None
    assert one.bandwidth_share > 0


@pytest.mark.parametrize("batch", [1, 2])
def test_steps_through_a_daemon_take_some_time(toy: Path, batch: int) -> None:
    assert actor_step_s(toy, batch, tokens=48) > 0


def test_a_delta_of_several_tokens_tells_nothing_of_a_step() -> None:
    assert step_times([(1.0, 1), (1.25, 1), (1.75, 2), (2.125, 1)]) == [0.25, 0.375]
