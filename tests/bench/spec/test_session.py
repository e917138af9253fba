import pytest
from msgspec import structs

from bench.spec.session import (
    ALL_CASES,
    VERIFY_SHAPES,
    prefix_of,
    shape_name,
    spec_cases,
    verified_shapes,
)
from runtime.executor.simulated_engine import simulated_config


@pytest.mark.parametrize("prefix", ["cpu", "ort-cuda", "tensorrt"])
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
    plan = structs.replace(cuda, backend="tensorrt")
    assert [prefix_of(one) for one in (cpu, cuda, plan)] == ["cpu", "ort-cuda", "tensorrt"]


def test_the_verified_shapes_are_those_of_the_plan() -> None:
    assert [shape_name(one) for one in VERIFY_SHAPES] == ["10-6-60", "4-3-16", "1-4-5", "8-1-9"]


def test_an_engine_of_chains_is_verified_with_chains() -> None:
    config = structs.replace(simulated_config(), enable_eagle_spec_decode=True)
    assert verified_shapes(config) == VERIFY_SHAPES
    chains = verified_shapes(structs.replace(config, chains_only=True))
    assert [shape_name(one) for one in chains] == ["1-4-5"]
