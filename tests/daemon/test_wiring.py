from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from actors.messages import ExecutorReady
from actors.roles import ExecutorRole, TokenizerRole
from daemon import wiring
from daemon.configuration.settings import FIELDS, Settings
from runtime.errors import HearthError
from runtime.executor.simulated_engine import simulated_config
from runtime.options import SpeculationOptions, check_speculation

ENGINE = Path("/engines/x")
SOCKETS = Path("/run/h")


def test_each_setting_reaches_the_part_that_it_is_for() -> None:
    settings = Settings(
        socket="ipc:///run/s",
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
    )
    door = wiring.door_settings(settings)
    assert (door.socket, door.clients, door.requests_per_client) == ("/run/s", 3, 4)
    assert (door.lease_s, door.queued_requests, door.queued_tokens) == (5, 6, 7)
    assert door.memory_bytes == 100 << 20
    shared = Settings(placement_executor="shared")
    assert wiring.door_settings(shared).memory_bytes == 0, "an engine's memory is no client's"
    policy = wiring.policy_settings(settings)
    assert (policy.fill_wait_s, policy.hold_s, policy.ageing_s) == (0.008, 9, 10)
    assert (policy.queue_requests, policy.queue_tokens) == (6, 7)
    deadlines = wiring.deadlines(settings)
    assert (deadlines.load_s, deadlines.progress_s) == (11, 12)
    options = wiring.runtime_options(settings)
    assert (options.threads, options.capacity, options.verify) == (13, 14, False)


def test_what_an_executor_can_hold_is_what_clients_are_told() -> None:
    limits = ExecutorReady("w", "c", max_batch=1, max_prompt_tokens=1023, max_total_tokens=1024)
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
    assert set(structs.asdict(options)) <= set(structs.asdict(Settings()))


def test_by_default_the_executor_alone_has_a_process() -> None:
    settings = Settings()
    book = wiring.address_book(settings, SOCKETS)
    plans = wiring.plans(book, settings, ENGINE)
    assert [(plan.name, plan.own_process, plan.restart_limit) for plan in plans] == [
        ("executor", True, 3)
    ]
    assert book.seen_from("daemon").tokenizer == "inproc://tokenizer"


def test_each_incarnation_of_the_executor_has_addresses_of_its_own() -> None:
    settings = Settings()
    plan = wiring.plans(wiring.address_book(settings, SOCKETS), settings, ENGINE)[0]
    first, second = plan.role(1), plan.role(2)
    assert isinstance(first, ExecutorRole)
    assert isinstance(second, ExecutorRole)
    assert first.inboxes.work != second.inboxes.work
    assert first.addresses.tokenizer.startswith("ipc://")


def test_actors_placed_in_processes_are_kept_by_the_supervisor() -> None:
    settings = Settings(placement_tokenizer="process", placement_scheduler="process")
    book = wiring.address_book(settings, SOCKETS)
    plans = wiring.plans(book, settings, ENGINE)
    assert [plan.name for plan in plans] == ["executor", "tokenizer", "scheduler"]
    assert all(plan.own_process for plan in plans)
    role = plans[1].role(1)
    assert isinstance(role, TokenizerRole)
    assert role.engine == str(ENGINE)


def test_clients_are_told_the_limits_that_hold() -> None:
    config = simulated_config(capacity=100)
    facts = wiring.door_facts(Settings(), "home", config, {"dtype": "float32"})
    assert (facts.prompt_tokens, facts.total_tokens, facts.model) == (99, 100, "home")
    assert wiring.door_facts(Settings(queue_tokens=9), "", config, {}).prompt_tokens == 9
