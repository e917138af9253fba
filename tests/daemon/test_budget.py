import pytest
from msgspec import structs

from daemon import budget
from daemon.budget import Budget, budget_of, host_budget_of, predicted_parts
from runtime.decoding.deployment import DeploymentConfig
from runtime.errors import HearthError
from runtime.executor.simulated_engine import simulated_config
from runtime.options import EagleDraftingConfig, SpeculationOptions
from tests.daemon.test_gpu_facts import GPU
from tests.runtime.engine_configs import PLAN, draft_config, small_config


def test_the_parts_add_up() -> None:
    assert Budget({"weights": 3, "cache": 4}, 10).needed == 7


def test_what_fits_exactly_fits() -> None:
    Budget({"weights": 10}, 10).check()


def test_what_does_not_fit_is_refused_with_both_figures() -> None:
    with pytest.raises(HearthError, match="needs 12 MiB and 10 MiB are free") as caught:
        Budget({"weights": 12 << 20}, 10 << 20).check()
    assert caught.value.code == "out_of_memory"


def test_a_larger_cache_needs_more() -> None:
    small = budget_of(DeploymentConfig(simulated_config(capacity=256)))
    large = budget_of(DeploymentConfig(simulated_config(capacity=4096)))
    assert small.needed < large.needed
    assert small.available > 0


def gpu_deployment() -> DeploymentConfig:
    return DeploymentConfig(structs.replace(small_config(), device="cuda"))


def with_draft(deployment: DeploymentConfig) -> DeploymentConfig:
    """The same with a draft of one layer."""
    draft = draft_config(deployment.base)
    return deployment._replace(
        method="eagle", draft=draft, speculation=SpeculationOptions(eagle=EagleDraftingConfig())
    )


def test_a_draft_adds_its_parts() -> None:
    plain = DeploymentConfig(small_config())
    parts = predicted_parts(with_draft(plain))
    added = {name for name in parts if name.startswith("draft_")}
    assert set(parts) - added == set(predicted_parts(plain))
    assert min(parts[name] for name in added) > 0
    assert budget_of(with_draft(plain)).needed > budget_of(plain).needed


@pytest.mark.parametrize(("base", "draft", "more"), [(640, 64, 0), (64, 640, 576)])
def test_two_plans_share_the_memory_of_their_steps(base: int, draft: int, more: int) -> None:
    deployment = with_draft(gpu_deployment())
    assert deployment.draft is not None
    one, other = (
        structs.replace(config, plan=structs.replace(PLAN, scratch_bytes=wanted))
        for config, wanted in ((deployment.base, base), (deployment.draft, draft))
    )
    parts = predicted_parts(deployment._replace(base=one, draft=other))
    assert (parts["engine_scratch"], parts["draft_scratch"]) == (base, more)


def test_a_draft_of_a_gpu_is_read_through_the_host() -> None:
    plain, drafted = (
        host_budget_of(one) for one in (gpu_deployment(), with_draft(gpu_deployment()))
    )
    assert plain is not None
    assert drafted is not None
    assert drafted.needed - plain.needed == drafted.parts["draft_weights_while_loading"] > 0


def test_a_gpu_is_asked_when_its_facts_are_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "gpu_facts", lambda: GPU)
    assert budget_of(gpu_deployment()) == budget_of(gpu_deployment(), GPU)


def test_the_context_that_asked_is_free_again() -> None:
    found = budget_of(gpu_deployment(), GPU)
    assert found.available == GPU.memory_free + found.parts["context"]
    empty = structs.replace(GPU, memory_free=GPU.memory_total)
    assert budget_of(gpu_deployment(), empty).available == GPU.memory_total


def test_a_full_gpu_is_named() -> None:
    full = structs.replace(GPU, memory_total=1 << 20, memory_free=0)
    with pytest.raises(HearthError, match="MiB on Some GPU and 1 MiB are free"):
        budget_of(gpu_deployment(), full).check()


def test_only_an_engine_of_a_gpu_needs_host_memory_beside_its_own() -> None:
    assert host_budget_of(DeploymentConfig(small_config())) is None
    found = host_budget_of(gpu_deployment())
    assert found is not None
    assert found.needed > found.parts["pinned"]
    assert found.where == " on the host"
