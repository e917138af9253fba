from __future__ import annotations

import pytest

from hearth.daemon.supervision.file_watch import STILL_S, FileWatch, InPlace, Mark, WatchedFile

FILES = (WatchedFile("weights"), WatchedFile("answer.json", mapped=False))
WHOLE = Mark(1, 10, 100, 5, 5)
OTHER = Mark(1, 11, 100, 9, 9)


def marks(weights: Mark | None = WHOLE, answer: Mark | None = WHOLE) -> dict[str, Mark | None]:
    return {"weights": weights, "answer.json": answer}


def watch(at: float = 0.0) -> FileWatch:
    made = FileWatch()
    made.began(FILES, marks(), at)
    return made


@pytest.mark.parametrize(
    ("weights", "found"),
    [
        (WHOLE, None),
        (WHOLE._replace(changed_ns=9), None),
        (WHOLE._replace(modified_ns=9), InPlace("weights", cut=False)),
        (WHOLE._replace(size=200), InPlace("weights", cut=False)),
        (WHOLE._replace(size=99), InPlace("weights", cut=True)),
        (OTHER, None),
        (OTHER._replace(device=2, inode=10), None),
        (None, None),
    ],
    ids=["as it was", "touched by chmod", "written", "longer", "cut", "mv", "mount", "removed"],
)
def test_a_file_is_changed_in_place_where_the_path_leads_to_what_was_mapped(
    weights: Mark | None, found: InPlace | None
) -> None:
    assert watch().look(marks(weights), 1.0) == found


def test_what_is_read_once_may_change() -> None:
    made = watch()
    assert made.look(marks(answer=WHOLE._replace(size=1)), 1.0) is None
    assert made.differing(marks(answer=WHOLE._replace(size=1))) == ["answer.json"]


def test_files_are_read_again_once_they_have_been_at_rest_for_long_enough() -> None:
    made = watch()
    for second in range(1, 5):
        made.look(marks(WHOLE._replace(modified_ns=10 + second)), float(second))
        assert not made.may_start(second + STILL_S - 0.1)
    assert made.may_start(4 + STILL_S)


def test_files_as_they_were_are_tried_again_late() -> None:
    made = watch()
    made.look(marks(), 10.0)
    assert not made.may_start(10.0)
    assert made.may_start(60.0)


def test_other_files_are_told_from_those_that_worked() -> None:
    made = watch()
    assert not made.are_others()
    made.worked()
    made.began(FILES, marks(WHOLE._replace(changed_ns=9)), 1.0)
    assert not made.are_others()
    made.began(FILES, marks(OTHER), 2.0)
    assert made.are_others()
    assert made.differing(marks(OTHER)) == []
    assert made.differing(marks()) == ["weights"]
