from hypothesis import given
from hypothesis import strategies as st

from hearth.daemon.service_state import STATES, ServiceState, words


def test_a_start_goes_through_its_stages_to_ready() -> None:
    state = ServiceState()
    assert words(*state) == "starting"
    state = state.loading("verifying", 0.434)
    assert words(*state) == "loading: verifying, 43%"
    state = state.loading("opening", None)
    assert words(*state) == "loading: opening"
    assert state.ready() == ServiceState("ready")
    assert words(*state.ready()) == "ready"


def test_the_reason_of_a_loss_stays_until_the_next_executor_is_ready() -> None:
    lost = ServiceState("ready").lost("it was ended by SIGKILL")
    assert words(*lost) == "starting (the executor was lost: it was ended by SIGKILL)"
    again = lost.loading("capturing", 0.5)
    assert (
        words(*again) == "loading: capturing, 50% (the executor was lost: it was ended by SIGKILL)"
    )
    assert again.lost("it did not load within 5 s").reason.endswith("it did not load within 5 s")
    assert again.ready() == ServiceState("ready")


def test_nothing_is_taken_in_from_a_cut_file_until_an_executor_is_ready() -> None:
    held = (
        ServiceState("ready")
        .lost("weights is cut short")
        .held("weights is cut short", refuses=True)
    )
    assert words(*held) == "starting: requests are refused (weights is cut short)"
    assert held.loading("opening", None).lost("again") == held
    assert held.loading("opening", None).ready() == ServiceState("ready")
    assert not ServiceState().held("weights is changed in place", refuses=False).refuses


def test_a_stop_is_not_undone_by_the_executor() -> None:
    state = ServiceState("ready").draining("SIGTERM")
    assert words(*state) == "draining (SIGTERM)"
    assert state.loading("opening", None) == state.ready() == state.lost("gone") == state
    assert state.draining("a second SIGTERM").reason == "a second SIGTERM"


def test_a_failure_is_the_end_and_stands_on_one_line() -> None:
    state = ServiceState("draining", reason="SIGTERM").failed("the executor\nwas lost")
    assert words(*state) == "failed (the executor was lost)"
    assert state.draining("SIGTERM") == state.ready() == state


EVENTS = {
    "loading": lambda state: state.loading("opening", None),
    "ready": lambda state: state.ready(),
    "lost": lambda state: state.lost("gone"),
    "held": lambda state: state.held("cut", refuses=True),
    "draining": lambda state: state.draining("SIGTERM"),
    "failed": lambda state: state.failed("broken"),
}
"""Each is named by the state that it leads to, but for the loss and the wait for files."""


@given(st.lists(st.sampled_from(sorted(EVENTS))))
def test_whatever_happens_the_state_is_known_and_ends_are_final(events: list[str]) -> None:
    state = ServiceState()
    for event in events:
        before, state = state, EVENTS[event](state)
        assert state.state in STATES
        order = ["draining", "failed"]
        if before.state in order:
            assert state.state in order[order.index(before.state) :]
        else:
            assert state.state == {"lost": "starting", "held": "starting"}.get(event, event)
