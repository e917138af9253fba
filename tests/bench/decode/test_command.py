import json
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from hearth.bench.contenders.contender import Job
from hearth.bench.decode import cases, command, contest, cpu
from hearth.bench.decode.cases import (
    CASES,
    ENGINES,
    GPU_CASES,
    LARGEST_BATCH,
    PEERS,
    Artifacts,
    GPUCase,
    GPUEngine,
)
from hearth.bench.decode.command import gpu_plan, run_gpu
from hearth.bench.decode.contest import PROMPT_TOKENS, Contest, prompt_ids
from hearth.bench.decode.cpu import SHARE_LIMIT, DecodeFigures, Plan, common_prefix, decode_figures
from hearth.bench.decode.gpu import GPUModels, GPUPlan
from hearth.bench.decode.gpu_figures import (
    GPUFigures,
    GPUTimes,
    compare_cases,
    gpu_figures,
    read_bandwidth,
    share_best_read,
    step_seconds,
)
from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.errors import HearthError
from tests.bench.running import hide, invoke, run

LIBRARIES = ("torch", "transformers", "llama_cpp", "gguf")


def decode(tmp_path: Path, *flags: str) -> tuple[int, dict[str, dict[str, object]], str]:
    arguments = ["decode", "--quick", "--threads", "1", "--cache", str(tmp_path / "cache"), *flags]
    result = invoke(*arguments, "--json")
    return result.return_value, json.loads(result.stdout.splitlines()[-1]), result.stderr


def test_missing_peers_are_null_and_stated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for peer in LIBRARIES:
        hide(tmp_path, peer, monkeypatch)
        monkeypatch.setitem(sys.modules, peer, None)
    code, figures, said = decode(tmp_path, "--case", "0.6b/fp32")
    case = figures["0.6b/fp32"]
    assert code == 0
    assert case["vs_transformers"] is case["vs_llama_cpp"] is None
    assert case["notes"] == [
        "transformers is left out: torch is not installed: make bench-env, or pip install torch",
        "llama_cpp is left out: gguf is not installed: make bench-env, or pip install gguf",
    ]
    assert said.splitlines()[0] == (
        "measured without some peers: torch, transformers, llama-cpp-python, gguf are not "
        "installed: make bench-env, or pip install torch transformers llama-cpp-python gguf"
    )
    assert isinstance(case["tokens_per_s"], float)
    assert isinstance(case["floor_share"], float)
    assert 0 < case["floor_share"] < SHARE_LIMIT


@pytest.mark.reference
def test_all_contenders_are_measured_together(tmp_path: Path) -> None:
    for peer in LIBRARIES:
        pytest.importorskip(peer)
    code, figures, progress = decode(tmp_path, "--case", "0.6b/fp32")
    case = figures["0.6b/fp32"]
    assert code == 0
    assert isinstance(case["vs_transformers"], float)
    assert isinstance(case["vs_llama_cpp"], float)
    assert case["same_tokens"] == {"transformers": case["tokens"], "llama_cpp": case["tokens"]}
    assert "round 2 of 2" in progress


NOTHING: dict[str, Any] = {
    "ready": (),
    "engines": (),
    "peers": (),
    "daemons": (),
    "dtype": None,
    "builder_python": None,
}


def refuse(*_: object, **__: object) -> Path:
    raise HearthError("unsupported_option", "no builder here", "plan")


def some_figures(
    case: GPUCase, models: GPUModels, plan: GPUPlan, *__: object
) -> dict[str, GPUFigures]:
    found = gpu_figures("ort-cuda", times(), case=case, step_bytes=1, dtype=plan.dtype, notes=[])
    return dict.fromkeys(map(str, models.folders), found)


@pytest.fixture
def faked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(command, "gpu_facts", lambda: None)
    monkeypatch.setattr(command, "serving_library", lambda _: "a library")
    monkeypatch.setattr(command, "shape_source", lambda *_, **__: tmp_path)
    monkeypatch.setattr(command, "gpu_engine", refuse)
    monkeypatch.setattr(command, "pooled_gguf", lambda *_, **__: None)
    monkeypatch.setattr(command, "measure_gpu", some_figures)
    return tmp_path


def test_everything_is_measured_unless_something_is_chosen() -> None:
    plan = gpu_plan(NOTHING, quick=False)
    assert (plan.engines, plan.dtype, plan.rounds) == (ENGINES, "float16", 7)
    assert (plan.peers, plan.daemons) == (PEERS, ENGINES)
    assert plan.builder_python == sys.executable
    chosen = {**NOTHING, "engines": ("tensorrt",), "dtype": "bfloat16"}
    plan = gpu_plan({**chosen, "peers": ("llama_cpp",), "daemons": ("none",)}, quick=True)
    assert (plan.peers, plan.daemons) == (("llama_cpp",), ())
    assert (plan.engines, plan.dtype, plan.rounds) == (("tensorrt",), "bfloat16", 2)


@pytest.mark.parametrize("text", ["tensorrt/0.6b", "other/0.6b=x", "tensorrt/0.6b="])
def test_a_folder_needs_engine_and_model(text: str) -> None:
    with pytest.raises(click.BadParameter, match="ENGINE/MODEL=DIR"):
        gpu_plan({**NOTHING, "ready": (text,)}, quick=False)


def test_a_folder_that_is_said_to_be_ready_is_there(tmp_path: Path) -> None:
    ready = (f"tensorrt/4b={tmp_path}/nothing",)
    with pytest.raises(click.BadParameter, match="there is no folder"):
        gpu_plan({**NOTHING, "ready": ready}, quick=False)


def test_an_engine_that_cannot_be_made_has_no_key_but_a_reason(
    faked: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = GPUPlan(ready={"ort-cuda/0.6b": faked})
    found = run_gpu([GPU_CASES["0.6b/b1"]], plan, faked, lambda _: None)
    assert list(found) == ["ort-cuda/0.6b/b1"]
    assert "tensorrt/0.6b is left out: no builder here" in capsys.readouterr().err


def test_a_run_that_is_cut_short_has_kept_the_cases_before(
    faked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end_at_batch_8(case: GPUCase, *rest: Any) -> dict[str, GPUFigures]:
        if case.batch == LARGEST_BATCH:
            raise KeyboardInterrupt
        return some_figures(case, *rest)

    monkeypatch.setattr(command, "measure_gpu", end_at_batch_8)
    both = [GPU_CASES["0.6b/b1"], GPU_CASES["0.6b/b8"]]
    plan = GPUPlan(ready={"ort-cuda/0.6b": faked})
    kept: list[list[str]] = []
    with pytest.raises(KeyboardInterrupt):
        run_gpu(both, plan, faked, lambda figures: kept.append(list(figures)))
    assert kept == [["ort-cuda/0.6b/b1"]]


def test_the_command_prints_and_records_keys_of_engine_and_case(
    faked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BENCH_COMMIT", "abc")
    kept = faked / "figures" / "h200.json"
    arguments = ["decode", "--device", "cuda", "--case", "4b/b1", "--case", "4b/b8"]
    arguments += ["--ready", f"ort-cuda/4b={faked}", "--cache", str(faked), "--record", str(kept)]
    _, figures = run(*arguments)
    assert list(figures) == ["ort-cuda/4b/b1", "ort-cuda/4b/b8"]
    assert figures["ort-cuda/4b/b8"]["tokens_vs_batch_1"] == 8
    assert json.loads(kept.read_text())["figures"] == figures


def test_the_table_has_a_row_a_key(faked: Path) -> None:
    arguments = ["decode", "--device", "cuda", "--case", "0.6b/b1", "--cache", str(faked)]
    arguments += ["--ready", f"tensorrt/0.6b={faked}", "--engine", "tensorrt"]
    result = invoke(*arguments)
    assert result.stdout.splitlines()[-1].split()[:3] == ["tensorrt/0.6b/b1", "2", "50"]


def test_without_any_engine_the_command_fails(faked: Path) -> None:
    assert run("decode", "--device", "cuda", "--cache", str(faked)) == (1, {})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--case", "4b/b1"], "no case on cpu"),
        (["--device", "cuda", "--case", "0.6b/fp32"], "no case on cuda"),
        (["--device", "cuda", "--threads", "2"], "for the CPU alone"),
        (["--engine", "tensorrt"], "are for a GPU"),
        (["--daemon", "none"], "are for a GPU"),
    ],
)
def test_what_is_for_another_device_is_refused(arguments: list[str], words: str) -> None:
    with pytest.raises(click.UsageError, match=words):
        invoke("decode", *arguments)


@pytest.fixture
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is made is in the list that it gives."""
    made: list[str] = []

    def no_gpu() -> None:
        raise HearthError("engine_incompatible", "there is no GPU", "device")

    monkeypatch.setattr(command, "gpu_facts", no_gpu)
    monkeypatch.setattr(command, "shape_source", lambda model, *_, **__: made.append(model))
    return made


def test_without_a_gpu_no_model_is_made(without_a_gpu: list[str], tmp_path: Path) -> None:
    with pytest.raises(HearthError) as caught:
        invoke("decode", "--device", "cuda", "--cache", str(tmp_path / "cache"))
    assert caught.value.code == "engine_incompatible"
    assert without_a_gpu == []
    assert not (tmp_path / "cache").exists()


def test_without_a_library_that_serves_an_engine_no_model_is_made(
    faked: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(config: LLMEngineRunnerConfig) -> str:
        raise HearthError("engine_incompatible", f"{config.backend} is absent", "device")

    monkeypatch.setattr(command, "serving_library", absent)
    monkeypatch.setattr(command, "shape_source", None)
    assert run_gpu(list(GPU_CASES.values()), GPUPlan(), faked, lambda _: None) == {}
    said = capsys.readouterr().err.splitlines()
    assert [line.split(" (")[0] for line in said] == [
        "kernels is left out: kernels is absent",
        "kernels-int8 is left out: kernels is absent",
        "kernels-int4 is left out: kernels is absent",
        "ort-cuda is left out: onnxruntime is absent",
        "tensorrt is left out: tensorrt is absent",
    ]


def test_a_model_that_is_absent_is_told_before_others_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cases, "SOURCE", tmp_path / "home")
    cache = tmp_path / "cache"
    words = ["decode", "--case", "0.6b/fp32", "--case", "tiny/fp32", "--cache", str(cache)]
    with pytest.raises(HearthError) as caught:
        invoke(*words)
    assert caught.value.code == "engine_missing"
    assert not cache.exists()


class FakeWorker:
    """Cannot run without a path; `closed` has the paths of those that ended."""

    closed: list[str] = []  # noqa: RUF012 - emptied by each test

    def __init__(self, job: Job, log: Path) -> None:
        self.job, self.log = job, log

    def ready(self) -> "FakeWorker":
        if not self.job.path:
            raise HearthError("unsupported_option", "nothing to run", "case")
        return self

    def close(self) -> None:
        self.closed.append(self.job.path)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(FakeWorker, "closed", [])
    monkeypatch.setattr(contest, "Worker", FakeWorker)
    return []


def test_who_cannot_run_is_left_out_with_the_reason(said: list[str]) -> None:
    case = Contest("0.6b/b1", Path("logs"), said.append)
    hearth = Job(contender="hearth", path="x")
    case.invite({"a peer": Job(contender="floor"), "hearth": hearth})
    assert list(case.workers) == ["hearth"]
    assert case.notes == ["a peer is left out: nothing to run"]
    assert said == [
        "0.6b/b1: loading a peer, hearth",
        "0.6b/b1: a peer is left out: nothing to run",
    ]
    worker: Any = case.workers["hearth"]
    assert worker.log == Path("logs/0.6b-b1-hearth.log")
    case.close()
    assert FakeWorker.closed == ["x"]


def test_who_must_run_ends_the_contest_when_it_cannot(said: list[str]) -> None:
    with pytest.raises(HearthError, match="nothing to run"):
        Contest("a", Path(), said.append).enter("hearth", Job(contender="hearth"))


def test_rounds_are_told(said: list[str]) -> None:
    assert sum(1 for _ in Contest("a", Path(), said.append).rounds(2)) == 2
    assert said == ["a: round 1 of 2", "a: round 2 of 2"]


def test_the_prompt_is_the_same_every_time_and_in_every_vocabulary() -> None:
    assert prompt_ids() == prompt_ids()
    assert len(prompt_ids()) == PROMPT_TOKENS
    assert prompt_ids(14) == prompt_ids()[:14]
    assert 3 <= min(prompt_ids()) <= max(prompt_ids()) < 256


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


GIB = 1 << 30


def times(**changes: object) -> GPUTimes:
    given: dict[str, object] = {
        "rounds": {
            "ort-cuda": [[9.0, 9.0, 0.002, 0.002]],
            "transformers": [[9.0, 9.0, 0.02, 0.02]],
            "torch_compile": [[9.0, 9.0, 0.003, 0.001]],
        },
        "floor": [0.004, 0.002],
        "floor_bytes": GIB,
        "host": {"ort-cuda": [5e-5, 4e-5, 9.0]},
        "raw": {"ort-cuda": 0.0016},
        "alone": {"ort-cuda": 0.00175},
        "actor": {"ort-cuda": 0.0021},
        **changes,
    }
    return GPUTimes(**given)  # type: ignore[arg-type] # of a test


def gpu_figures_of(
    given: GPUTimes, case: GPUCase = GPU_CASES["4b/b8"], engine: GPUEngine = "ort-cuda"
) -> GPUFigures:
    return gpu_figures(engine, given, case=case, step_bytes=4e9, dtype="float16", notes=["one"])


def test_a_round_counts_as_a_whole_without_its_first_steps() -> None:
    rounds = [[7.0, 7.0, 1.0, 3.0], [0.0, 0.0, 5.0, 5.0], [7.0, 7.0, 2.5, 2.5]]
    assert step_seconds(rounds) == 2.5


def test_the_bandwidth_is_that_of_the_fastest_pass() -> None:
    assert read_bandwidth(times()) == pytest.approx(GIB / 0.002)
    assert read_bandwidth(times(floor=[])) is None


def test_figures_of_an_engine() -> None:
    found = gpu_figures_of(times())
    assert found.step_ms == pytest.approx(2.0)
    assert found.host_us == pytest.approx(50)
    assert found.tokens_per_s == pytest.approx(4000)
    assert found.vs_transformers == pytest.approx(10)
    assert found.vs_torch_compile == pytest.approx(1)
    assert found.vs_ort_cuda is found.vs_llama_cpp is None
    assert (found.context, found.llama_cpp_type) == (128, "")
    assert found.raw_ms == pytest.approx(1.6)
    assert found.raw_alone_ms == pytest.approx(1.75)
    assert found.actor_over_raw == pytest.approx(1.2)
    assert found.bandwidth_share == pytest.approx(4e9 / 0.002 / (GIB / 0.002))
    assert (found.dtype, found.notes) == ("float16", ["one"])


def test_what_was_not_measured_is_none() -> None:
    rounds = {"ort-cuda": [[9.0, 9.0, 0.002]]}
    found = gpu_figures_of(times(rounds=rounds, floor=[], host={}, actor={}))
    assert found.host_us is found.bandwidth_share is found.vs_transformers is None
    assert found.vs_torch_compile is found.actor_over_raw is found.actor_ms is None


@pytest.mark.parametrize(
    ("engine", "stored", "ratio"),
    [("kernels", "F16", 3), ("kernels-int8", "Q8_0", 4), ("kernels-int4", "Q4_0", 5)],
)
def test_an_engine_is_compared_with_llama_cpp_of_as_many_bits_and_with_onnx_runtime(
    engine: GPUEngine, stored: str, ratio: float
) -> None:
    names = [engine, "llama_cpp F16", "llama_cpp Q8_0", "llama_cpp Q4_0", "ort-cuda"]
    steps = [0.001, 0.003, 0.004, 0.005, 0.002]
    rounds = {name: [[9.0, 9.0, step]] for name, step in zip(names, steps, strict=True)}
    found = gpu_figures_of(times(rounds=rounds, raw={engine: 0.0009}), engine=engine)
    assert found.llama_cpp_type == stored
    assert found.vs_llama_cpp == pytest.approx(ratio)
    assert found.llama_cpp_ms == pytest.approx(ratio)
    assert found.vs_ort_cuda == pytest.approx(2)


def test_cases_are_compared_within_an_engine_and_model() -> None:
    one, eight, long = (GPU_CASES[f"4b/{name}"] for name in ("b1", "b8", "b8/1000"))
    found = {f"ort-cuda/{case.name}": gpu_figures_of(times(), case) for case in (one, eight, long)}
    found["tensorrt/4b/b8"] = gpu_figures_of(times())
    found["ort-cuda/4b/b8/1000"].step_ms *= 1.25
    compare_cases(found, [one, eight, long])
    assert found["ort-cuda/4b/b8"].tokens_vs_batch_1 == pytest.approx(8)
    assert found["ort-cuda/4b/b8/1000"].over_short == pytest.approx(1.25)
    assert found["ort-cuda/4b/b1"].tokens_vs_batch_1 is None
    assert found["ort-cuda/4b/b8"].over_short is None
    assert found["tensorrt/4b/b8"].tokens_vs_batch_1 is None


def test_every_case_is_compared_with_the_best_read_of_the_run() -> None:
    slow, fast = gpu_figures_of(times(), GPU_CASES["4b/b1"]), gpu_figures_of(times())
    slow.read_gb_per_s, fast.read_gb_per_s = 2000.0, 4000.0
    share_best_read({"ort-cuda/4b/b1": slow, "ort-cuda/4b/b8": fast})
    assert slow.read_gb_per_s == fast.read_gb_per_s == 4000.0
    assert slow.bandwidth_share == pytest.approx(slow.step_bytes / slow.step_ms / 4e9)


def test_without_a_read_there_is_no_share() -> None:
    found = gpu_figures_of(times(floor=[]))
    share_best_read({"ort-cuda/4b/b1": found})
    assert found.bandwidth_share is None
