from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from hearth.daemon.supervision.restart_policy import (
    Action,
    AnnounceHeld,
    AnnounceLost,
    AnnounceReady,
    AnnounceRestart,
    GiveUp,
    Kill,
    Phase,
    Start,
    Supervision,
    SupervisionSettings,
)
from hearth.runtime.errors import HearthError

DEADLINES = SupervisionSettings(
    hello_s=10, load_timeout_s=100, progress_timeout_s=20, stable_s=60, pause_s=1
)


def supervision(restart_limit: int = 3) -> Supervision:
    return Supervision("executor", structs.replace(DEADLINES, restart_limit=restart_limit))


def started(at: float = 0.0, restart_limit: int = 3) -> Supervision:
    made = supervision(restart_limit)
    assert made.tick(at) == [Start(1)]
    return made


def running(at: float = 0.0, restart_limit: int = 3) -> Supervision:
    made = started(at, restart_limit)
    made.hello(at)
    assert made.ready(at) == [AnnounceReady()]
    return made


def test_an_actor_starts_loads_and_works() -> None:
    made = supervision()
    assert made.tick(5.0) == [Start(1)]
    assert made.next_wake() == 15.0
    made.hello(6.0)
    assert made.next_wake() == 106.0
    assert made.ready(50.0) == [AnnounceReady()]
    made.progress(60.0)
    assert made.next_wake() == 80.0
    assert made.tick(79.9) == []


def test_each_deadline_kills_and_names_itself() -> None:
    silent = started()
    assert silent.tick(10.0) == [Kill("it did not say hello within 10 s")]
    slow = started()
    slow.hello(1.0)
    assert slow.tick(101.0) == [Kill("it did not load within 100 s")]
    hung = running()
    reason = "it made no progress for 20 s"
    assert hung.tick(20.0) == [AnnounceLost(reason), Kill(reason)]
    assert hung.ended("it was ended by SIGKILL", 20.1) == [AnnounceRestart(reason)]
    assert hung.tick(20.1) == [Start(2)]


def test_a_process_that_stays_after_it_was_killed_is_given_up() -> None:
    made = running()
    made.tick(20.0)
    assert made.next_wake() == 20.0 + DEADLINES.kill_s
    (give_up,) = made.tick(20.0 + DEADLINES.kill_s)
    assert isinstance(give_up, GiveUp)
    assert give_up.error.code == "executor_stuck"
    assert "made no progress for 20 s" in give_up.error.message
    assert (made.phase, made.next_wake()) == (Phase.ENDED, None)


def test_a_lost_executor_is_announced_and_restarted_at_once() -> None:
    made = running()
    how = "it was ended by SIGKILL"
    assert made.ended(how, 3.0) == [AnnounceLost(how), AnnounceRestart(how)]
    assert made.tick(3.0) == [Start(2)]


def test_one_that_makes_room_is_replaced_at_once_and_counts_for_nothing() -> None:
    made = running(restart_limit=0)
    for turn in range(1, 4):
        made.renew("other weights")
        told = made.ended("it ended with status 0", 10.0 * turn, well=True)
        assert told == [AnnounceLost("other weights"), AnnounceRestart("other weights")]
        assert made.tick(10.0 * turn) == [Start(turn + 1)]
        made.hello(10.0 * turn)
        assert made.ready(10.0 * turn) == [AnnounceReady()]
    # Nobody has asked this one.
    assert isinstance(made.ended("it ended with status 0", 50.0, well=True)[-1], GiveUp)


def test_one_that_dies_or_hangs_while_it_makes_room_is_lost() -> None:
    died = running()
    died.renew("other weights")
    assert died.ended("it was ended by SIGKILL", 5.0)[0] == AnnounceLost("it was ended by SIGKILL")
    hung = running()
    hung.renew("other weights")
    assert hung.tick(20.0)[-1] == Kill("it made no progress for 20 s")
    assert hung.ended("it was ended by SIGKILL", 21.0) == [
        AnnounceRestart("it made no progress for 20 s")
    ]


def test_a_pause_has_a_bound() -> None:
    made = running(restart_limit=100)
    now = 1.0
    for _ in range(100):
        made.ended("it crashed", now)
        due = made.next_wake()
        assert due is not None
        assert due - now <= DEADLINES.most_pause_s
        now = due
        made.tick(now)
    assert made.phase is Phase.STARTING


def test_restarts_in_a_row_pause_longer_and_end() -> None:
    made = running()
    now, pauses = 1.0, []
    while True:
        actions = made.ended("it crashed", now)
        if made.phase is Phase.ENDED:
            break
        due = made.next_wake()
        assert due is not None
        pauses.append(due - now)
        now = due
        made.tick(now)
        made.hello(now)
        made.ready(now)
        now += 1
    assert pauses == [0, 1, 2]
    give_up = actions[-1]
    assert isinstance(give_up, GiveUp)
    assert give_up.error.message == "the executor was lost, 3 restarts did not help: it crashed"
    assert give_up.error.code == "executor_failed"


def test_stable_work_forgets_earlier_restarts() -> None:
    made = running(restart_limit=1)
    now = 0.0
    for incarnation in range(2, 10):
        now += 61
        made.ended("it crashed", now)
        assert made.tick(now) == [Start(incarnation)]
        made.hello(now)
        made.ready(now)


def test_a_failure_of_the_first_load_ends_with_its_own_error() -> None:
    made = started()
    made.hello(1.0)
    error = HearthError("engine_corrupt", "model.onnx is missing", "model.onnx")
    made.failed(error)
    assert made.ended("it ended with status 1", 2.0) == [GiveUp(error)]
    assert made.next_wake() is None


def test_a_failure_to_load_again_counts_as_a_restart() -> None:
    made = running()
    made.ended("it was ended by SIGSEGV", 1.0)
    made.tick(1.0)
    made.hello(1.0)
    made.failed(HearthError("out_of_memory", "there is no room for the cache"))
    restart = AnnounceRestart("there is no room for the cache")
    assert made.ended("it ended with status 1", 2.0) == [restart]
    assert made.next_wake() == 3.0


def test_what_an_actor_said_last_explains_its_loss() -> None:
    made = running(restart_limit=0)
    made.failed(HearthError("executor_failed", "3 batches failed in a row"))
    lost, give_up = made.ended("it ended with status 1", 5.0)
    assert lost == AnnounceLost("3 batches failed in a row")
    assert isinstance(give_up, GiveUp)
    assert give_up.error.message == "the executor was lost: 3 batches failed in a row"


def test_after_stop_nothing_is_done() -> None:
    made = running()
    made.stop()
    assert made.ended("it ended with status 0", 1.0) == []
    assert made.tick(1e9) == []
    assert made.ready(2.0) == []


EVENTS = st.lists(
    st.tuples(st.sampled_from(["hello", "ready", "progress", "ended", "failed"]), st.floats(0, 50)),
    max_size=40,
)


@given(events=EVENTS, restart_limit=st.integers(0, 3))
def test_announcements_alternate_and_starts_are_bounded(
    events: list[tuple[str, float]], restart_limit: int
) -> None:
    made = supervision(restart_limit)
    now, alive, done = 0.0, False, list[Action]()
    for event, wait in events:
        now += wait
        actions = made.tick(now)
        alive = alive or any(isinstance(action, Start) for action in actions)
        if event == "ready":
            actions += made.ready(now)
        elif event == "ended" and alive:
            alive = False
            actions += made.ended("it ended", now)
        elif event == "failed":
            made.failed(HearthError("internal", "it failed"))
        elif event in ("hello", "progress"):
            getattr(made, event)(now)
        done += actions
    told = [action for action in done if isinstance(action, AnnounceReady | AnnounceLost)]
    assert all(isinstance(one, AnnounceReady) for one in told[::2])
    assert all(isinstance(one, AnnounceLost) for one in told[1::2])
    starts = [action.incarnation for action in done if isinstance(action, Start)]
    assert starts == list(range(1, len(starts) + 1))
    assert sum(isinstance(action, GiveUp) for action in done) <= 1


def test_other_deadlines_count_for_what_goes_on() -> None:
    other = structs.replace(DEADLINES, load_timeout_s=30, progress_timeout_s=5)
    loading = started()
    loading.hello(1.0)
    loading.adopt(other)
    assert loading.next_wake() == 31.0
    working = running(at=2.0)
    working.adopt(other)
    assert working.next_wake() == 7.0
    working.progress(4.0)
    assert working.next_wake() == 9.0


def test_another_restart_limit_counts_from_the_next_loss() -> None:
    made = running()
    made.adopt(structs.replace(DEADLINES, restart_limit=0))
    _, give_up = made.ended("it crashed", 1.0)
    assert isinstance(give_up, GiveUp)


def test_a_lost_encoder_is_told_by_a_code_of_its_own() -> None:
    made = Supervision("encoder", structs.replace(DEADLINES, restart_limit=0))
    made.tick(0.0)
    *_, give_up = made.ended("it crashed", 1.0)
    assert isinstance(give_up, GiveUp)
    assert give_up.error.code == "encoder_failed"
    assert give_up.error.message == "the encoder was lost: it crashed"


def test_what_no_number_of_restarts_ends_goes_on_after_very_many() -> None:
    made, now = running(restart_limit=sys.maxsize), 0.0
    for _ in range(1100):
        lost = made.ended("it crashed", now)
        assert isinstance(lost[-1], AnnounceRestart)
        now += DEADLINES.most_pause_s
        assert isinstance(made.tick(now)[-1], Start)


CHANGED = HearthError("weights_invalid", "weights is changed in place", "weights")
CUT = HearthError("weights_invalid", "weights is cut short", "weights")


def test_an_actor_whose_files_are_changed_is_ended_and_held_until_they_are_at_rest() -> None:
    made = running(restart_limit=0)
    assert made.spoil(CHANGED, 5.0, refuses=False) == [
        AnnounceLost(CHANGED.message),
        Kill(CHANGED.message),
        AnnounceHeld(CHANGED, refuses=False),
    ]
    assert made.spoil(CHANGED, 6.0, refuses=False) == []
    assert made.ended("it was ended by SIGKILL", 6.1) == []
    assert made.held
    assert (made.tick(1000.0), made.next_wake()) == ([], None)
    # A cut file lets nothing in, also once it grows again.
    assert made.spoil(CUT, 7.0, refuses=True) == [AnnounceHeld(CUT, refuses=True)]
    assert made.spoil(CHANGED, 8.0, refuses=False) == [AnnounceHeld(CHANGED, refuses=True)]
    made.release(10.0)
    assert made.tick(10.0) == [Start(2)]
    assert made.spoiled is None
    made.hello(10.0)
    assert made.ready(10.0) == [AnnounceReady()]
    assert AnnounceHeld(CHANGED, refuses=False) in made.spoil(CHANGED, 11.0, refuses=False)


def test_files_that_cannot_be_read_hold_an_actor_that_has_worked() -> None:
    made = running(restart_limit=1)
    made.ended("it was ended by SIGBUS", 1.0)
    for second in range(2, 12):
        made.release(second)
        assert [type(one) for one in made.tick(second)] == [Start]
        made.failed(CUT)
        assert made.ended("it ended with status 1", second) == [AnnounceHeld(CUT, refuses=True)]
        assert made.tick(second) == []


@pytest.mark.parametrize("others", [True, False])
def test_a_wrong_answer_is_that_of_the_files_where_these_are_others(*, others: bool) -> None:
    made = running(restart_limit=1)
    made.ended("it was ended by SIGKILL", 1.0)
    made.tick(1.0)
    made.failed(HearthError("wrong_answer", "it computes another model"), others=others)
    (told,) = made.ended("it ended with status 1", 2.0)
    assert isinstance(told, AnnounceHeld if others else GiveUp)


def test_an_actor_that_ends_for_good_is_not_held() -> None:
    made = running()
    made.stop()
    assert made.spoil(CUT, 1.0, refuses=True) == []
    made.release(2.0)
    assert made.phase is Phase.ENDED
