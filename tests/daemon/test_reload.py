import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from daemon.configuration.settings import FIELDS, Settings
from daemon.reload import RELOADABLE, change_to

OTHER = Settings(clients=7, hold_s=9.0, threads=3, log_level="debug", engine="other")


def test_all_that_can_be_reloaded_are_settings() -> None:
    assert set(FIELDS) >= RELOADABLE


def test_what_differs_is_taken_or_named_in_the_order_of_the_settings() -> None:
    change = change_to(Settings(), OTHER)
    assert change.changed == ["hold_s", "clients", "log_level"]
    assert change.needs_restart == ["engine", "threads"]
    assert change.settings == Settings(clients=7, hold_s=9.0, log_level="debug")


def test_what_needs_a_restart_is_named_until_it_has_come_or_is_taken_back() -> None:
    once = change_to(Settings(), OTHER).settings
    again = change_to(once, OTHER)
    assert (again.changed, again.needs_restart) == ([], ["engine", "threads"])
    back = change_to(once, structs.replace(OTHER, engine="", threads=0))
    assert (back.changed, back.needs_restart) == ([], [])


@pytest.mark.parametrize("name", ["engine", "socket", "max_batch", "ageing_s", "prefill_budget"])
def test_what_is_fixed_at_the_start_is_not_reloaded(name: str) -> None:
    assert name not in RELOADABLE


@given(st.sets(st.sampled_from(sorted(FIELDS))))
def test_each_setting_is_on_one_side(names: set[str]) -> None:
    other = structs.replace(Settings(), **{name: object() for name in names})
    change = change_to(Settings(), other)
    assert {*change.changed, *change.needs_restart} == names
    waits = {"weights"} if "engine" in names else set()
    assert {*change.changed} == (names & RELOADABLE) - waits
    for name in FIELDS:
        source = other if name in change.changed else Settings()
        assert getattr(change.settings, name) == getattr(source, name)


def test_weights_wait_for_the_engine_that_they_were_made_for() -> None:
    running = Settings(engine="a")
    alone = change_to(running, Settings(engine="a", weights="w"))
    assert (alone.changed, alone.needs_restart) == (["weights"], [])
    both = change_to(running, Settings(engine="b", weights="w", hold_s=3.0))
    assert (both.changed, both.needs_restart) == (["hold_s"], ["engine", "weights"])
    assert both.settings == Settings(engine="a", hold_s=3.0)
