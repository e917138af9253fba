import numpy as np
import pytest
from msgspec import structs

from hearth.runtime.batch import tokens_to_generate
from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.device.cpu.cpu_device import CpuDevice
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.engine_executor import EngineExecutor
from hearth.runtime.executor.simulated_engine import simulated_config
from hearth.runtime.generation.assembly import share_context_memory
from hearth.runtime.generation.batch_runtime import check_row
from hearth.runtime.generation.budget import Budget, budgets_of, fit_deployment
from hearth.runtime.generation.deployment import DeploymentConfig, StoredEngines
from hearth.runtime.generation.predicted import predict_memory
from hearth.runtime.kv_cache.disk_cache import HEAD_BYTES
from hearth.runtime.kv_cache.page_pool import ARRIVING, STAGED, page_bytes, record_bytes
from hearth.runtime.kv_cache.pages import TierCapacity
from hearth.runtime.options import EagleDraftingConfig, RuntimeOptions, SpeculationOptions
from hearth.runtime.request import RequestOptions, RowRequest
from tests.runtime.engine_configs import PLAN, draft_config, small_config
from tests.runtime.executor.fake_engine import FakeEngine, fake_registry

MIB, GIB = 1 << 20, 1 << 30
PLENTY = 512 * GIB
WHOLE = structs.replace(
    small_config(),
    device="cuda",
    dtype="float16",
    kv_cache_dtype="float16",
    num_decoder_layers=28,
    num_attention_layers=28,
    num_attention_heads=16,
    num_kv_heads=8,
    head_dim=128,
    rotary_dim=128,
    hidden_size=1024,
    intermediate_size=3072,
    vocab_size=151_936,
    output_vocab_size=151_936,
    max_supported_batch_size=8,
    max_supported_input_length=4095,
    max_kv_cache_capacity=4096,
    prefill_chunk=256,
)
"""A model of 0.6B weights as it is exported for a GPU by default."""
ON_CPU = structs.replace(WHOLE, device="cpu")
BUILT = structs.replace(
    WHOLE,
    backend="tensorrt",
    static_decode_batches=(1, 2, 3, 8),
    plan=structs.replace(PLAN, scratch_bytes=300 * MIB),
)


def limits(deployment: DeploymentConfig) -> tuple[int, int]:
    base = deployment.base
    return base.max_supported_batch_size, base.max_kv_cache_capacity


def fit(
    config: LLMEngineRunnerConfig,
    host: int,
    gpu: int | None = None,
    *,
    rows: int = 0,
    capacity: int = 0,
) -> DeploymentConfig:
    options = RuntimeOptions(max_batch=rows, capacity=capacity)
    return fit_deployment(StoredEngines(config), options, host, gpu)


def needed(config: LLMEngineRunnerConfig, rows: int, capacity: int) -> int:
    """Bytes in the one memory of a CPU, or of a GPU that shares the host's."""
    deployment = fit(config, PLENTY, rows=rows, capacity=capacity)
    return budgets_of(deployment, PLENTY, None)[0].needed


def with_margin(size: int) -> int:
    """The least free memory that has this size and an eighth to spare."""
    free = size * 8 // 7
    return next(one for one in range(free - 8, free + 9) if one - one // 8 >= size)


def gpu_deployment() -> DeploymentConfig:
    return DeploymentConfig(structs.replace(small_config(), device="cuda"))


def with_draft(deployment: DeploymentConfig) -> DeploymentConfig:
    """The same with a draft of one layer."""
    draft = draft_config(deployment.base)
    return deployment._replace(
        method="eagle", draft=draft, speculation=SpeculationOptions(eagle=EagleDraftingConfig())
    )


def test_the_parts_add_up_and_what_fits_exactly_fits() -> None:
    budget = Budget({"weights": 30, "cache": 40}, 70)
    assert budget.needed == 70
    assert budget.fits(margin=False)
    assert not budget.fits(margin=True)
    assert Budget({"weights": 70}, 80).fits(margin=True)


def test_a_larger_cache_needs_more() -> None:
    small, large = (
        budgets_of(DeploymentConfig(simulated_config(capacity=size)), PLENTY, None)
        for size in (256, 4096)
    )
    assert small[0].needed < large[0].needed


def test_a_draft_adds_its_parts() -> None:
    plain = DeploymentConfig(small_config())
    parts = predict_memory(with_draft(plain)).device
    added = {name for name in parts if name.startswith("draft_")}
    assert set(parts) - added == set(predict_memory(plain).device)
    assert min(parts[name] for name in added) > 0


@pytest.mark.parametrize(("base", "draft", "more"), [(640, 64, 0), (64, 640, 576)])
def test_two_plans_share_the_memory_of_their_steps(base: int, draft: int, more: int) -> None:
    deployment = with_draft(gpu_deployment())
    assert deployment.draft is not None
    one, other = (
        structs.replace(config, plan=structs.replace(PLAN, scratch_bytes=wanted))
        for config, wanted in ((deployment.base, base), (deployment.draft, draft))
    )
    parts = predict_memory(deployment._replace(base=one, draft=other)).device
    assert (parts["engine_scratch"], parts["draft_scratch"]) == (base, more)


def test_only_an_engine_of_a_gpu_needs_host_memory_beside_its_own() -> None:
    assert len(budgets_of(DeploymentConfig(small_config()), GIB, None)) == 1
    device, host = budgets_of(gpu_deployment(), GIB, 2 * GIB)
    # The engine's context takes the place of the one beside which free memory was asked.
    assert device.available == 2 * GIB + device.parts["context"]
    assert (host.available, device.where, host.where) == (GIB, " on the GPU", " on the host")
    assert host.needed > host.parts["pinned"]
    drafted = budgets_of(with_draft(gpu_deployment()), GIB, 2 * GIB)[1]
    assert drafted.needed - host.needed == drafted.parts["draft_weights_while_loading"] > 0


def test_an_integrated_gpu_shares_one_memory_with_its_host() -> None:
    device, host = budgets_of(with_draft(gpu_deployment()), GIB, GIB)
    (both,) = budgets_of(with_draft(gpu_deployment()), 3 * GIB, None)
    loading = host.parts["weights_while_loading"] + host.parts["draft_weights_while_loading"]
    assert both.needed == device.needed + host.needed - loading
    assert both.available == 3 * GIB
    assert both.parts["host_process"] == host.parts["process"]


@pytest.mark.parametrize("gpu", [None, PLENTY])
@pytest.mark.parametrize("config", [WHOLE, ON_CPU, BUILT])
def test_a_machine_with_room_serves_all_that_was_exported(
    config: LLMEngineRunnerConfig, gpu: int | None
) -> None:
    found = fit(config, PLENTY, gpu)
    assert (limits(found), found.chosen) == ((8, 4096), "")


def test_the_defaults_fit_a_board_of_8_gb() -> None:
    # MemAvailable of such a board without a desktop, which has 7.4 GiB in all.
    free = 5600 * MIB
    with pytest.raises(HearthError, match="lower max_batch or capacity"):
        fit(WHOLE, free, rows=8, capacity=4096)
    found = fit(WHOLE, free)
    assert limits(found) == (2, 4096)
    (budget,) = budgets_of(found, free, None)
    assert budget.needed <= free * 7 / 8
    whole = -(-needed(WHOLE, 8, 4096) // MIB)
    assert found.chosen == (
        f"2 rows of 4096 tokens: 8 rows of 4096 tokens would take {whole} MiB of the memory that "
        "GPU and host share and 5600 MiB are free, an eighth of it for others"
    )


@pytest.mark.parametrize("config", [WHOLE, ON_CPU])
def test_rows_are_given_up_before_capacity(config: LLMEngineRunnerConfig) -> None:
    for expected in ((8, 4096), (4, 4096), (2, 4096), (1, 4096), (1, 2048), (1, 1024)):
        free = with_margin(needed(config, *expected))
        assert limits(fit(config, free)) == expected
        if expected != (1, 1024):
            assert limits(fit(config, free - 1)) < expected


def test_the_memory_of_a_gpu_decides_where_it_has_its_own() -> None:
    for expected in ((4, 4096), (1, 2048)):
        rows, capacity = expected
        deployment = fit(WHOLE, PLENTY, PLENTY, rows=rows, capacity=capacity)
        budget = budgets_of(deployment, PLENTY, PLENTY)[0]
        free = with_margin(budget.needed) - budget.parts["context"]
        assert limits(fit(WHOLE, PLENTY, free)) == expected
    with pytest.raises(HearthError, match="MiB on the host and 1024 MiB are free"):
        fit(WHOLE, GIB, PLENTY)


def test_one_row_of_1024_slots_is_not_given_up() -> None:
    free = with_margin(needed(ON_CPU, 1, 1024)) - 1
    with pytest.raises(
        HearthError, match=r"1 row of 1024 tokens would take .* an eighth"
    ) as caught:
        fit(ON_CPU, free)
    assert (caught.value.code, caught.value.field) == ("out_of_memory", "capacity")
    # Who asks for it gets it without a margin.
    assert limits(fit(ON_CPU, free, rows=1, capacity=1024)) == (1, 1024)


@pytest.mark.parametrize(
    ("rows", "capacity", "expected"),
    [(8, 0, (8, 1024)), (0, 4096, (1, 4096)), (6, 0, (6, 1024)), (0, 3000, (1, 3000))],
)
def test_what_is_asked_for_stays(rows: int, capacity: int, expected: tuple[int, int]) -> None:
    free = with_margin(needed(ON_CPU, *expected))
    assert limits(fit(ON_CPU, free, rows=rows, capacity=capacity)) == expected


def test_odd_limits_go_down_to_powers_of_two() -> None:
    odd = structs.replace(ON_CPU, max_supported_batch_size=6, max_kv_cache_capacity=3000)
    odd = structs.replace(odd, max_supported_input_length=2999)
    for expected in ((6, 3000), (4, 3000), (1, 3000), (1, 2048)):
        assert limits(fit(odd, with_margin(needed(odd, *expected)))) == expected


def test_an_engine_below_the_least_keeps_its_capacity() -> None:
    small = structs.replace(ON_CPU, max_kv_cache_capacity=96, max_supported_input_length=95)
    free = with_margin(needed(small, 1, 96))
    assert limits(fit(small, free)) == (1, 96)
    with pytest.raises(HearthError, match="1 row of 96 tokens"):
        fit(small, free - 1)


def test_a_plan_serves_the_batches_that_it_was_built_with() -> None:
    for rows in (8, 3, 2, 1):
        assert limits(fit(BUILT, with_margin(needed(BUILT, rows, 4096)))) == (rows, 4096)
    with pytest.raises(HearthError, match="1 row of 4096 tokens would take"):
        fit(BUILT, needed(BUILT, 1, 4096))


def test_an_engine_that_leaves_no_choice_needs_no_margin() -> None:
    alone = structs.replace(ON_CPU, max_supported_batch_size=1, max_kv_cache_capacity=1024)
    alone = structs.replace(alone, max_supported_input_length=1023)
    free = needed(alone, 1, 1024)
    assert limits(fit(alone, free)) == (1, 1024)
    with pytest.raises(HearthError, match="the engine needs"):
        fit(alone, free - 1)


def with_cache(free: int, most: int, *, rows: int = 0, capacity: int = 0) -> DeploymentConfig:
    options = RuntimeOptions(max_batch=rows, capacity=capacity, prefix_cache_bytes=most)
    return fit_deployment(StoredEngines(ON_CPU), options, free, None)


def test_the_prefix_cache_gives_way_before_rows_do() -> None:
    page, largest = page_bytes(ON_CPU, None), needed(ON_CPU, 8, 4096)
    most = 64 * page
    # What is known of the pages takes memory beside them.
    with_records = most + record_bytes(TierCapacity(64))
    found = with_cache(with_margin(largest + with_records), most)
    assert (limits(found), found.prefix.device, found.chosen) == ((8, 4096), 64, "")
    found = with_cache(with_margin(largest + with_records // 4), most)
    assert (limits(found), found.prefix.device) == ((8, 4096), 16)
    cache = f"a prefix cache of {most // 4 >> 20} MiB"
    assert found.chosen.startswith(f"8 rows of 4096 tokens and {cache}: 8 rows of 4096 tokens and ")
    found = with_cache(with_margin(largest), most)
    assert (limits(found), found.prefix.device) == ((8, 4096), 0)
    assert found.chosen.startswith("8 rows of 4096 tokens and no prefix cache: ")
    found = with_cache(with_margin(largest) - 1, most)
    assert (limits(found), found.prefix.device) == ((4, 4096), 0)


def test_rows_and_capacity_that_are_asked_for_leave_the_cache_what_is_free() -> None:
    page, asked = page_bytes(ON_CPU, None), needed(ON_CPU, 2, 2048)
    found = with_cache(asked + 9 * page, 64 * page, rows=2, capacity=2048)
    assert (limits(found), found.prefix.device) == ((2, 2048), 8)
    assert "an eighth" not in found.chosen
    with pytest.raises(HearthError, match="the engine needs"):
        with_cache(asked - 1, 64 * page, rows=2, capacity=2048)


def test_pages_in_host_memory_and_on_disk_go_with_those_of_the_device() -> None:
    page = page_bytes(WHOLE, None)
    options = RuntimeOptions(
        prefix_cache_bytes=64 * page,
        prefix_host_bytes=64 * page,
        prefix_disk_bytes=99 * (page + HEAD_BYTES),
        prefix_folder="/x",
    )
    gpu = budgets_of(fit(WHOLE, PLENTY, PLENTY), PLENTY, PLENTY)[0]

    def tiers(more: int) -> TierCapacity:
        free = with_margin(gpu.needed + more) - gpu.parts["context"]
        return fit_deployment(StoredEngines(WHOLE), options, PLENTY, free).prefix

    assert tiers(33 * page) == TierCapacity(32, 32, 99)
    assert tiers(page) == TierCapacity(0)


def test_a_draft_counts_when_limits_are_chosen() -> None:
    base = structs.replace(
        ON_CPU,
        enable_eagle_spec_decode=True,
        eagle_layers=(1, 2, 3),
        output_hidden_dim=3 * ON_CPU.hidden_size,
        max_verify_tree_size=8,
    )
    drafted = StoredEngines(base, draft_config(base))
    options = RuntimeOptions(speculation=SpeculationOptions(method="auto"))
    found = fit_deployment(drafted, options, with_margin(needed(ON_CPU, 8, 4096)), None)
    assert found.method == "eagle"
    assert found.draft is not None
    assert limits(found) == (4, 4096)
    assert found.draft.max_supported_batch_size == 4


def test_the_prefix_cache_is_counted_where_its_pages_lie() -> None:
    draft = with_draft(gpu_deployment())
    size = page_bytes(draft.base, draft.draft)
    plain = budgets_of(draft, GIB, GIB)
    paged = budgets_of(draft._replace(prefix=TierCapacity(device=7, host=3, disk=5)), GIB, GIB)
    # Pages on their way from and to the disk take memory too.
    assert paged[0].parts["prefix_cache"] == (7 + ARRIVING) * size
    records = record_bytes(TierCapacity(7, 3, 5))
    assert paged[1].needed - plain[1].needed == (3 + STAGED) * size + records
    cpu = DeploymentConfig(small_config(), prefix=TierCapacity(4))
    taken = 4 * page_bytes(small_config(), None) + record_bytes(TierCapacity(4))
    assert predict_memory(cpu).device["prefix_cache"] == taken


CONFIG = structs.replace(
    simulated_config(vocab_size=100, capacity=64), max_supported_input_length=40
)


def _row(
    tokens: int = 3, prompt: int | None = None, max_tokens: int = 5, token_id: int = 1
) -> RowRequest:
    length = tokens if prompt is None else prompt
    return RowRequest(
        token_ids=[token_id] * tokens,
        prompt_length=length,
        options=RequestOptions(max_tokens=max_tokens),
    )


@pytest.mark.parametrize(
    "row",
    [
        _row(),
        _row(tokens=40),
        _row(tokens=40, max_tokens=24),
        _row(tokens=1, max_tokens=63),
        _row(tokens=63, prompt=40, max_tokens=24),
        _row(token_id=99),
    ],
)
def test_rows_at_the_limit_are_served(row: RowRequest) -> None:
    check_row(CONFIG, row, 64)


@pytest.mark.parametrize(
    ("row", "code", "field"),
    [
        (_row(tokens=0), "prompt_empty", "token_ids"),
        (_row(prompt=0), "prompt_empty", "token_ids"),
        (_row(prompt=4), "invalid_value", "prompt_length"),
        (_row(tokens=41), "prompt_too_long", "token_ids"),
        (_row(token_id=100), "invalid_value", "token_ids"),
        (_row(token_id=-1), "invalid_value", "token_ids"),
        (_row(max_tokens=0), "invalid_value", "max_tokens"),
        (_row(tokens=8, prompt=3, max_tokens=5), "invalid_value", "max_tokens"),
        (_row(tokens=40, max_tokens=25), "capacity_exceeded", "max_tokens"),
        (_row(tokens=60, prompt=40, max_tokens=25), "capacity_exceeded", "max_tokens"),
    ],
)
def test_a_row_beyond_a_limit_is_refused_by_field(row: RowRequest, code: str, field: str) -> None:
    with pytest.raises(HearthError) as caught:
        check_row(CONFIG, row, 64)
    assert (caught.value.code, caught.value.field) == (code, field)


def test_without_a_limit_a_row_takes_what_fits() -> None:
    unlimited = RowRequest(token_ids=[1] * 40, prompt_length=40)
    check_row(CONFIG, unlimited, 64)
    assert tokens_to_generate(unlimited, 64) == 24
    with pytest.raises(HearthError) as caught:
        check_row(CONFIG, unlimited, 40)
    assert (caught.value.code, caught.value.field) == ("capacity_exceeded", "token_ids")


def _executor(wants: int) -> tuple[EngineExecutor, FakeEngine]:
    engine = FakeEngine()
    engine.required_context_memory = wants
    return EngineExecutor(engine, fake_registry(), ()), engine


def test_the_engine_that_wants_most_says_how_much_they_share() -> None:
    executors, engines = zip(*(_executor(wants) for wants in (640, 0, 64)), strict=True)
    share_context_memory(executors, CpuDevice())
    memory = engines[0].memory
    assert memory is not None
    assert (memory.shape, memory.dtype) == ((640,), np.dtype(np.uint8))
    assert all(engine.memory is memory for engine in engines)


def test_engines_that_want_none_get_none() -> None:
    executor, engine = _executor(0)
    share_context_memory([executor], CpuDevice())
    assert engine.memory is None
