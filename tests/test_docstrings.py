import re

import pytest

from tests.tools.trees import repository
from tools.house import FORBIDDEN_OPENING, count_docstrings, docstrings

# Beginnings of the paths that are held; ("",) holds all sources.
HELD = ("",)
UNNAMED_ERRORS = re.compile(r"\braises\s+what\b", re.IGNORECASE)


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    found = count_docstrings(repository()).found
    assert not [place for place in found if place.startswith(HELD)]


def test_docstrings_name_their_errors() -> None:
    assert not [
        f"{file.path}:{line}"
        for file in repository().sources
        for line, text in docstrings(file.tree)
        if UNNAMED_ERRORS.search(text)
    ]


@pytest.mark.parametrize("text", ["Open it; raises what opening does.", "Raises what\nrun raises."])
def test_an_error_without_a_name_is_found(text: str) -> None:
    assert UNNAMED_ERRORS.search(text)


@pytest.mark.parametrize("text", ["What it is.", "Whether it is.", "So it is.", "Those of a row."])
def test_an_opening_without_a_subject_is_found(text: str) -> None:
    assert FORBIDDEN_OPENING.match(text)


@pytest.mark.parametrize("text", ["Offset of a slot.", "Item.", "Sort rows.", "Whole rows."])
def test_words_that_only_begin_like_one_are_not(text: str) -> None:
    assert not FORBIDDEN_OPENING.match(text)
