import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hearth.runtime.errors import HearthError
from hearth.runtime.text.chat_template import ChatTemplate, template_messages
from hearth.runtime.text.conversation import Conversation, ToolCall, Turn
from hearth.runtime.text.tokenizer import MarkerEscape, SpecialText, alternatives

MESSAGES = [{"role": "user", "content": "hi"}]


def render(
    source: str,
    messages: list[dict[str, str]] | None = None,
    tokens: dict[str, str] | None = None,
) -> str:
    return ChatTemplate(source, tokens or {}).render(MESSAGES if messages is None else messages)


def refused(source: str) -> HearthError:
    with pytest.raises(HearthError) as caught:
        render(source)
    assert (caught.value.code, caught.value.field) == ("invalid_value", "messages")
    return caught.value


def test_blocks_leave_no_white_space() -> None:
    source = (
        "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}"
    )
    assert render(source) == "hi\n"


def test_token_variables_and_the_generation_prompt() -> None:
    source = "{{ bos_token }}{{ messages[0]['role'] }}{% if add_generation_prompt %}!{% endif %}"
    assert render(source, tokens={"bos_token": "<s>"}) == "<s>user!"
    assert render(source) == "user!"


def test_tools_and_documents_are_none() -> None:
    assert render("{{ tools is none and documents is none }}") == "True"


def test_loops_can_break() -> None:
    source = "{% for m in messages %}{{ m.content }}{% break %}{% endfor %}"
    assert render(source, MESSAGES * 3) == "hi"


def test_generation_blocks_render_as_their_body() -> None:
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}") == "hi"


def test_json_keeps_letters_as_they_are() -> None:
    messages = [{"role": "user", "content": 'é<&>"'}]
    assert render("{{ messages[0].content | tojson }}", messages) == '"é<&>\\""'
    assert render("{{ {'b': 1, 'a': 2} | tojson(sort_keys=True) }}") == '{"a": 2, "b": 1}'
    assert render("{{ messages[0].content | tojson(ensure_ascii=True) }}", messages) == (
        '"\\u00e9<&>\\""'
    )


def test_the_date_can_be_written() -> None:
    assert re.fullmatch(r"\d{4}-\d\d", render("{{ strftime_now('%Y-%m') }}"))


def test_a_refusal_passes_on_the_template_s_words_and_no_more() -> None:
    error = refused("{{ raise_exception('roles must\n alternate\x07' ~ '!' * 1000) }}")
    assert "roles must alternate!" in error.message
    assert "\x07" not in error.message
    assert len(error.message) < 300


@pytest.mark.parametrize(
    "expression",
    [
        "messages[5].content",
        "messages[0].content / 0",
        "1 / 0",
        "messages.__class__.__mro__",
        "messages.append(1)",
        "range(10**9) | list",
        "missing.thing.thing",
        "'\ud800' | urlencode",
    ],
)
def test_other_failures_get_our_own_sentence(expression: str) -> None:
    error = refused(f"{{{{ {expression} }}}}")
    assert error.message == (
        "the model's chat template cannot render these messages: check their roles and order"
    )


@pytest.mark.parametrize("source", ["{% for %}", "{{ a b }}", "{% nosuchtag %}", "{{" + "(" * 9999])
def test_what_is_no_template_is_refused_by_the_file_s_name(source: str) -> None:
    with pytest.raises(HearthError) as caught:
        ChatTemplate(source, {})
    assert (caught.value.code, caught.value.field) == ("engine_corrupt", "chat_template.jinja")


def messages_of(source: str, *turns: Turn) -> list[dict[str, Any]]:
    nothing = MarkerEscape(SpecialText([]), SpecialText([]))
    return template_messages(Conversation([*turns]), ChatTemplate(source, {}), nothing)


def test_a_developer_is_the_system_where_the_template_knows_none() -> None:
    turn = Turn("developer", "be brief")
    assert messages_of("{{ messages[0].role }}", turn)[0]["role"] == "system"
    knowing = "{% if messages[0].role == 'developer' %}{% endif %}"
    assert messages_of(knowing, turn)[0]["role"] == "developer"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_the_name_that_the_template_looks_for(name: str) -> None:
    turn = Turn("assistant", "yes", reasoning="hm")
    for source in (f"{{{{ messages[0].{name} }}}}", f"{{{{ messages[0]['{name}'] }}}}"):
        assert messages_of(source, turn)[0][name] == "hm"
    assert messages_of("{{ messages[0].content }}", turn) == [
        {"role": "assistant", "content": "yes"}
    ]


CALL_ARGUMENTS = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{% set a = c.function.arguments %}"
)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ a | tojson }}", {"a": "é"}),
        ("{{ a if a is string else a | tojson }}", {"a": "é"}),
        ("{% for k, v in a | items %}{{ k }}={{ v }}{% endfor %}", {"a": "é"}),
        ("{{ '' + a }}", '{"a": "é"}'),
        ("{{ a }}", '{"a": "é"}'),
    ],
)
def test_arguments_are_text_where_only_that_renders_right(source: str, expected: Any) -> None:
    turn = Turn("assistant", tool_calls=[ToolCall("c1", "f", {"a": "é"})])
    source = f"{CALL_ARGUMENTS}{source}{{% endfor %}}{{% endfor %}}"
    (message,) = messages_of(source, turn)
    assert message["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": expected}}
    ]


def test_a_result_has_the_name_of_its_call() -> None:
    called = Turn("assistant", tool_calls=[ToolCall("c1", "f", {})])
    found = messages_of("", called, Turn("tool", "x", tool_call_id="c1"))[1]
    assert found == {"role": "tool", "content": "x", "tool_call_id": "c1", "name": "f"}


def test_variables_come_through_and_hearth_s_own_win() -> None:
    template = ChatTemplate(
        "{{ think }}{{ bos_token }}{{ add_generation_prompt }}", {"bos_token": "B"}
    )
    given = {"think": 1, "bos_token": "X", "add_generation_prompt": 7}
    assert template.render(MESSAGES, variables=given) == "1BTrue"


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
