from hearth.actors.messages import ExecutorLimits
from hearth.actors.settings import PolicySettings
from hearth.daemon.door.state import door_facts, within
from hearth.runtime.executor.simulated_engine import simulated_config


def test_what_an_executor_can_hold_is_what_clients_are_told() -> None:
    limits = ExecutorLimits(max_batch=1, max_prompt_tokens=1023, max_total_tokens=1024)
    config = within(simulated_config(capacity=4096, max_batch=8), limits)
    assert config.max_supported_batch_size == 1
    facts = door_facts(PolicySettings(), "model", config, {})
    assert (facts.prompt_tokens, facts.total_tokens) == (1023, 1024)


def test_clients_are_told_the_limits_that_hold() -> None:
    config = simulated_config(capacity=100)
    facts = door_facts(PolicySettings(), "home", config, {"dtype": "float32"})
    assert (facts.prompt_tokens, facts.total_tokens, facts.model) == (99, 100, "home")
    assert door_facts(PolicySettings(queue_tokens=9), "", config, {}).prompt_tokens == 9
