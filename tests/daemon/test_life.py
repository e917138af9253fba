from hypothesis import given
from hypothesis import strategies as st

from hearth.daemon.life import STATES, Life, words


def test_a_start_goes_through_its_stages_to_ready() -> None:
    life = Life()
    assert words(*life) == "starting"
    life = life.loading("verifying", 0.434)
    assert words(*life) == "loading: verifying, 43%"
    life = life.loading("opening", None)
    assert words(*life) == "loading: opening"
    assert life.ready() == Life("ready")
    assert words(*life.ready()) == "ready"


def test_the_reason_of_a_loss_stays_until_the_next_executor_is_ready() -> None:
    lost = Life("ready").lost("it was ended by SIGKILL")
    assert words(*lost) == "starting (the executor was lost: it was ended by SIGKILL)"
    again = lost.loading("capturing", 0.5)
    assert (
        words(*again) == "loading: capturing, 50% (the executor was lost: it was ended by SIGKILL)"
    )
    assert again.lost("it did not load within 5 s").reason.endswith("it did not load within 5 s")
    assert again.ready() == Life("ready")


def test_nothing_is_taken_in_from_a_cut_file_until_an_executor_is_ready() -> None:
    held = Life("ready").lost("weights is cut short").held("weights is cut short", refuses=True)
    assert words(*held) == "starting: requests are refused (weights is cut short)"
    assert held.loading("opening", None).lost("again") == held
    assert held.loading("opening", None).ready() == Life("ready")
    assert not Life().held("weights is changed in place", refuses=False).refuses


def test_a_stop_is_not_undone_by_the_executor() -> None:
    life = Life("ready").draining("SIGTERM")
    assert words(*life) == "draining (SIGTERM)"
    assert life.loading("opening", None) == life.ready() == life.lost("gone") == life
    assert life.draining("a second SIGTERM").reason == "a second SIGTERM"


def test_a_failure_is_the_end_and_stands_on_one_line() -> None:
    life = Life("draining", reason="SIGTERM").failed("the executor\nwas lost")
    assert words(*life) == "failed (the executor was lost)"
    assert life.draining("SIGTERM") == life.ready() == life


EVENTS = {
    "loading": lambda life: life.loading("opening", None),
    "ready": lambda life: life.ready(),
    "lost": lambda life: life.lost("gone"),
    "held": lambda life: life.held("cut", refuses=True),
    "draining": lambda life: life.draining("SIGTERM"),
    "failed": lambda life: life.failed("broken"),
}
"""Each is named by the state that it leads to, but for the loss and the wait for files."""


@given(st.lists(st.sampled_from(sorted(EVENTS))))
def test_whatever_happens_the_state_is_known_and_ends_are_final(events: list[str]) -> None:
    life = Life()
    for event in events:
        before, life = life, EVENTS[event](life)
        assert life.state in STATES
        order = ["draining", "failed"]
        if before.state in order:
            assert life.state in order[order.index(before.state) :]
        else:
            assert life.state == {"lost": "starting", "held": "starting"}.get(event, event)
