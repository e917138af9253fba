import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.daemon.configuration.settings import SETTINGS, Settings, replaced, settings_of
from hearth.daemon.service import change_to

OTHER = settings_of(clients=7, hold_s=9.0, threads=3, log_level="debug", engine="other")


def test_what_differs_is_taken_or_named_in_the_order_of_the_settings() -> None:
    change = change_to(Settings(), OTHER)
    assert change.changed == ["hold_s", "clients", "log_level"]
    assert change.needs_restart == ["engine", "threads"]
    assert change.settings == settings_of(clients=7, hold_s=9.0, log_level="debug")


def test_what_needs_a_restart_is_named_until_it_has_come_or_is_taken_back() -> None:
    once = change_to(Settings(), OTHER).settings
    again = change_to(once, OTHER)
    assert (again.changed, again.needs_restart) == ([], ["engine", "threads"])
    back = change_to(once, replaced(OTHER, engine="", threads=0))
    assert (back.changed, back.needs_restart) == ([], [])


@pytest.mark.parametrize("name", ["engine", "socket", "max_batch", "ageing_s", "prefill_budget"])
def test_what_is_fixed_at_the_start_is_not_reloaded(name: str) -> None:
    assert not SETTINGS[name].declared.reloads


@given(st.sets(st.sampled_from(sorted(SETTINGS))))
def test_each_setting_is_on_one_side(names: set[str]) -> None:
    other = settings_of(**{name: object() for name in names})
    change = change_to(Settings(), other)
    assert {*change.changed, *change.needs_restart} == names
    waits = {"weights"} if "engine" in names else set()
    assert {*change.changed} == {name for name in names if SETTINGS[name].declared.reloads} - waits
    for name in SETTINGS:
        source = other if name in change.changed else Settings()
        assert SETTINGS[name].of(change.settings) == SETTINGS[name].of(source)


def test_weights_wait_for_the_engine_that_they_were_made_for() -> None:
    running = settings_of(engine="a")
    alone = change_to(running, settings_of(engine="a", weights="w"))
    assert (alone.changed, alone.needs_restart) == (["weights"], [])
    both = change_to(running, settings_of(engine="b", weights="w", hold_s=3.0))
    assert (both.changed, both.needs_restart) == (["hold_s"], ["engine", "weights"])
    assert both.settings == settings_of(engine="a", hold_s=3.0)
