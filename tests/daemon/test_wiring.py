from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from actors.addresses import SocketFolder
from actors.messages import ExecutorLimits, ExecutorReady
from actors.roles import ExecutorSettings
from actors.supervisor_messages import ActorReady
from daemon import wiring
from daemon.configuration.settings import FIELDS, Settings
from runtime.errors import HearthError
from runtime.executor.simulated_engine import simulated_config
from runtime.options import SpeculationOptions, check_speculation

ENGINE = Path("/engines/x")


def test_each_setting_reaches_the_part_that_it_is_for() -> None:
    settings = Settings(
        socket="/run/s",
        clients=3,
        requests_per_client=4,
        lease_s=5,
        client_memory_mb=100,
        queue_requests=6,
        queue_tokens=7,
        fill_wait_ms=8,
        hold_s=9,
        ageing_s=10,
        load_timeout_s=11,
        progress_timeout_s=12,
        threads=13,
        capacity=14,
        verify=False,
        images_per_request=15,
        image_bytes=1 << 16,
        images_in_flight_bytes=1 << 21,
        image_tokens=17,
    )
    door = wiring.door_settings(settings)
    assert (door.socket, door.clients, door.requests_per_client) == ("/run/s", 3, 4)
    assert (door.lease_s, door.queued_requests, door.queued_tokens) == (5, 6, 7)
    assert door.memory_bytes == 100 << 20
    assert (door.images, door.image_bytes, door.image_tokens) == (15, 1 << 16, 17)
    assert door.request_image_bytes == 1 << 21
    policy = wiring.policy_settings(settings)
    assert (policy.fill_wait_s, policy.hold_s, policy.ageing_s) == (0.008, 9, 10)
    assert (policy.queue_requests, policy.queue_tokens) == (6, 7)
    deadlines = wiring.executor_plan(settings, ENGINE).deadlines
    assert (deadlines.load_s, deadlines.progress_s) == (11, 12)
    options = wiring.runtime_options(settings)
    assert (options.threads, options.capacity, options.verify) == (13, 14, False)


def test_what_an_executor_can_hold_is_what_clients_are_told() -> None:
    limits = ExecutorLimits(max_batch=1, max_prompt_tokens=1023, max_total_tokens=1024)
    config = wiring.within(simulated_config(capacity=4096, max_batch=8), limits)
    assert config.max_supported_batch_size == 1
    facts = wiring.door_facts(Settings(), "model", config, {})
    assert (facts.prompt_tokens, facts.total_tokens) == (1023, 1024)


def test_speculation_is_set_under_the_same_names() -> None:
    assert wiring.speculation_options(Settings()) == SpeculationOptions(method="auto")
    settings = Settings(
        speculation="eagle", drafting_top_k=4, drafting_step=3, verify_tree_size=16, lookup_tokens=7
    )
    options = wiring.runtime_options(settings).speculation
    assert (options.method, options.lookup_tokens) == ("eagle", 7)
    eagle = options.eagle
    assert eagle is not None
    assert (eagle.drafting_top_k, eagle.drafting_step, eagle.verify_tree_size) == (4, 3, 16)


def test_the_prefix_cache_is_set_under_the_same_names(tmp_path: Path) -> None:
    assert wiring.runtime_options(Settings()).prefix_folder == ""
    settings = Settings(
        prefix_cache_bytes=1, prefix_host_bytes=2, prefix_disk_bytes=3, prefix_folder=str(tmp_path)
    )
    options = wiring.runtime_options(settings)
    assert (options.prefix_cache_bytes, options.prefix_host_bytes) == (1, 2)
    assert (options.prefix_disk_bytes, options.prefix_folder) == (3, str(tmp_path))


def test_pages_are_spilled_to_the_cache_where_no_folder_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEARTH_CACHE", str(tmp_path))
    options = wiring.runtime_options(Settings(prefix_disk_bytes=1))
    assert options.prefix_folder == str(tmp_path / "prefix")


@pytest.mark.parametrize("name", ["prefix_host_bytes", "prefix_disk_bytes"])
def test_what_takes_from_a_prefix_cache_is_refused_where_there_is_none(name: str) -> None:
    with pytest.raises(HearthError, match="prefix_cache_bytes, which is 0") as caught:
        wiring.runtime_options(structs.replace(Settings(prefix_cache_bytes=0), **{name: 1}))
    assert (caught.value.code, caught.value.field) == ("invalid_value", name)


@pytest.mark.parametrize("missing", ["drafting_top_k", "drafting_step", "verify_tree_size"])
def test_a_tree_that_is_given_in_part_is_refused(missing: str) -> None:
    whole = Settings(drafting_top_k=4, drafting_step=3, verify_tree_size=16)
    with pytest.raises(HearthError, match="together") as caught:
        wiring.runtime_options(structs.replace(whole, **{missing: 0}))
    assert (caught.value.code, caught.value.field) == ("invalid_value", missing)


@pytest.mark.parametrize(
    "name", ["drafting_top_k", "drafting_step", "verify_tree_size", "lookup_tokens"]
)
def test_the_largest_of_each_setting_of_speculation_is_an_option(name: str) -> None:
    kind = msgspec.inspect.type_info(FIELDS[name].type)
    assert isinstance(kind, msgspec.inspect.Metadata)
    assert isinstance(kind.type, msgspec.inspect.IntType)
    tree = Settings(drafting_top_k=4, drafting_step=3, verify_tree_size=16)
    settings = structs.replace(tree, **{name: kind.type.le})
    check_speculation(wiring.speculation_options(settings))


def test_every_runtime_option_is_a_setting_of_the_same_name() -> None:
    options = wiring.runtime_options(Settings())
    # The one that is the sum of two.
    names = set(structs.asdict(options)) - {"image_memory"}
    assert names <= set(structs.asdict(Settings()))


def test_the_executor_s_paths_do_not_depend_on_the_working_folder() -> None:
    plan = wiring.executor_plan(
        Settings(restart_limit=7, log_format="json"), Path("engines/x"), "b09"
    )
    assert isinstance(plan.settings, ExecutorSettings)
    assert plan.settings.engine == str(Path.cwd() / "engines/x")
    assert (plan.role, plan.restart_limit, plan.log_format) == ("executor", 7, "json")
    assert plan.epoch == "b09"


def test_the_scheduler_is_told_where_an_executor_listens_and_what_it_takes() -> None:
    addresses = SocketFolder(Path("/run/h")).addresses("executor", 2)
    ready = ActorReady("executor-2", 1, {}, ExecutorLimits(3, 4, 5))
    assert wiring.executor_ready(ready, addresses) == ExecutorReady(
        2, "ipc:///run/h/executor-2", "ipc:///run/h/executor-2-control", ExecutorLimits(3, 4, 5)
    )


def test_clients_are_told_the_limits_that_hold() -> None:
    config = simulated_config(capacity=100)
    facts = wiring.door_facts(Settings(), "home", config, {"dtype": "float32"})
    assert (facts.prompt_tokens, facts.total_tokens, facts.model) == (99, 100, "home")
    assert wiring.door_facts(Settings(queue_tokens=9), "", config, {}).prompt_tokens == 9
