import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hearth.runtime.errors import HearthError
from hearth.runtime.text.tokenizer import MarkerEscape, SpecialText, alternatives

SPELLINGS = ["<|end|>", "<|end_of|>", "[X]", "<s>"]
texts = st.lists(
    st.sampled_from([*SPELLINGS, "<|", "end|>", "<", ">", "X]", " ", "\n", "a", "é", "[", "|>"])
).map("".join)


def escape() -> MarkerEscape:
    return MarkerEscape(SpecialText(SPELLINGS), SpecialText(SPELLINGS))


@settings(deadline=None)
@given(texts)
def test_reveal_undoes_hide(text: str) -> None:
    cloak = escape()
    assert cloak.reveal(cloak.hide(text)) == text


@settings(deadline=None)
@given(texts)
def test_no_special_token_is_left(text: str) -> None:
    hidden = escape().hide(text)
    assert not any(spelling in hidden for spelling in SPELLINGS)


@settings(deadline=None)
@given(texts, texts)
def test_texts_side_by_side_make_no_special_token(left: str, right: str) -> None:
    cloak = escape()
    joined = cloak.hide(left).strip() + cloak.hide(right).strip()
    assert not any(spelling in joined for spelling in SPELLINGS)
    for literal in ("|>", "<", "s>", "<|end"):
        beside = literal + cloak.hide(left).strip() + literal
        assert not any(spelling in beside for spelling in SPELLINGS)


@settings(deadline=None)
@given(st.text("ab c\n"))
def test_ordinary_text_is_not_touched(text: str) -> None:
    assert escape().hide(text) == text


def test_white_space_around_a_message_stays() -> None:
    cloak = escape()
    hidden = cloak.hide(" \n<s>\t ")
    assert hidden.startswith(" \n")
    assert hidden.endswith("\t ")
    assert len(hidden) == 5
    assert cloak.hide(" \n ") == " \n "


def test_a_border_tears_every_hidden_piece() -> None:
    cloak = escape()
    assert cloak.reveal(cloak.hide("a<s>b<s>c"), "#") == "a<#s>b<#s>c"


def test_equal_pieces_share_a_stand_in() -> None:
    cloak = escape()
    assert cloak.hide("a<s>b").replace("a", "b") == cloak.hide("b<s>b")


def test_more_pieces_than_stand_ins_are_refused() -> None:
    spellings = [f"<{n}>" for n in range(2049)]
    cloak = MarkerEscape(SpecialText(spellings), SpecialText(spellings))
    cloak.hide("a".join(spellings[:2048]))
    with pytest.raises(HearthError) as caught:
        cloak.hide(f"a{spellings[2048]}a")
    assert (caught.value.code, caught.value.field) == ("invalid_value", "messages")


def test_no_patterns_match_nothing() -> None:
    assert alternatives([]).search("anything") is None
    assert MarkerEscape(SpecialText([]), SpecialText([])).hide("<s>") == "<s>"
