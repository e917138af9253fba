import pytest

from hearth_ros.sentences import SentenceSplitter

TEXTS = [
    ("It is 3.5 degrees. Shall I heat?", ["It is 3.5 degrees.", "Shall I heat?"]),
    ("He said: “Stop!” Then he left.", ["He said: “Stop!”", "Then he left."]),
    ("Well... no. 1. Go\n2. Stop", ["Well...", "no.", "1. Go", "2. Stop"]),
    ("Dr. Who, e.g. J. Doe, came. Fine", ["Dr. Who, e.g. J. Doe, came.", "Fine"]),
    ("灯を点けました。次は？はい", ["灯を点けました。", "次は？", "はい"]),  # noqa: RUF001 - CJK
    ("\n\n  One \n Two\n", ["One", "Two"]),
    ('{"action":"turn_on","device":"lamp"}', ['{"action":"turn_on","device":"lamp"}']),
    ("", []),
]


@pytest.mark.parametrize(("text", "sentences"), TEXTS)
@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_sentences_are_the_same_in_pieces_of_any_size(
    text: str, sentences: list[str], size: int
) -> None:
    splitter = SentenceSplitter()
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    found = [one for piece in pieces for one in splitter.feed(piece)]
    assert found + splitter.flush() == sentences
    assert not splitter.flush()


def test_a_sentence_comes_with_the_space_behind_it_and_no_later() -> None:
    splitter = SentenceSplitter()
    assert splitter.feed("The lamp is on.") == []
    assert splitter.feed(" ") == ["The lamp is on."]


def test_what_does_not_end_is_cut_at_a_pause() -> None:
    splitter = SentenceSplitter(most=20)
    found = splitter.feed("one two, three four five six seven")
    assert found == ["one two, three four"]
    assert splitter.feed("x" * 50) == ["five six", "seven" + "x" * 15, "x" * 20]


def test_a_run_of_signs_is_cut_as_well() -> None:
    found = SentenceSplitter(most=100).feed("." * 100_000)
    assert {len(one) for one in found} == {100}
