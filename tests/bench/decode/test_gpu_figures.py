import pytest

from hearth.bench.decode.cases import GPU_CASES, GPUCase, GPUEngine
from hearth.bench.decode.gpu_figures import (
    GPUFigures,
    GPUTimes,
    compare_cases,
    gpu_figures,
    read_bandwidth,
    share_best_read,
    step_seconds,
)

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


def figures(
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
    found = figures(times())
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
    found = figures(times(rounds=rounds, floor=[], host={}, actor={}))
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
    found = figures(times(rounds=rounds, raw={engine: 0.0009}), engine=engine)
    assert found.llama_cpp_type == stored
    assert found.vs_llama_cpp == pytest.approx(ratio)
    assert found.llama_cpp_ms == pytest.approx(ratio)
    assert found.vs_ort_cuda == pytest.approx(2)


def test_cases_are_compared_within_an_engine_and_model() -> None:
    one, eight, long = (GPU_CASES[f"4b/{name}"] for name in ("b1", "b8", "b8/1000"))
    found = {f"ort-cuda/{case.name}": figures(times(), case) for case in (one, eight, long)}
    found["tensorrt/4b/b8"] = figures(times())
    found["ort-cuda/4b/b8/1000"].step_ms *= 1.25
    compare_cases(found, [one, eight, long])
    assert found["ort-cuda/4b/b8"].tokens_vs_batch_1 == pytest.approx(8)
    assert found["ort-cuda/4b/b8/1000"].over_short == pytest.approx(1.25)
    assert found["ort-cuda/4b/b1"].tokens_vs_batch_1 is None
    assert found["ort-cuda/4b/b8"].over_short is None
    assert found["tensorrt/4b/b8"].tokens_vs_batch_1 is None


def test_every_case_is_compared_with_the_best_read_of_the_run() -> None:
    slow, fast = figures(times(), GPU_CASES["4b/b1"]), figures(times())
    slow.read_gb_per_s, fast.read_gb_per_s = 2000.0, 4000.0
    share_best_read({"ort-cuda/4b/b1": slow, "ort-cuda/4b/b8": fast})
    assert slow.read_gb_per_s == fast.read_gb_per_s == 4000.0
    assert slow.bandwidth_share == pytest.approx(slow.step_bytes / slow.step_ms / 4e9)


def test_without_a_read_there_is_no_share() -> None:
    found = figures(times(floor=[]))
    share_best_read({"ort-cuda/4b/b1": found})
    assert found.bandwidth_share is None
