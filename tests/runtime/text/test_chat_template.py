import re

import pytest

from hearth.runtime.errors import HearthError
from hearth.runtime.text.chat_template import ChatTemplate

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
    refused("{{ 'x' | tojson(ensure_ascii=True) }}")


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
