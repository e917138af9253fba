from typing import Any

import pytest

from hearth.runtime.errors import HearthError
from hearth.runtime.text.chat_template import ChatTemplate
from hearth.runtime.text.reply_format import OWN_CALLS, CallForm
from hearth.runtime.text.reply_probe import ReplyProbe
from tests.runtime.text.folders import CHATML

TOOLS = "{% if tools %}<|tools|>{{ tools | tojson }}{% endif %}"
TURNS = (
    TOOLS + "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% if m.tool_calls %}CALLS{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
EACH = "{% for c in m.tool_calls %}{% set f = c.function %}"
JSON_ARGUMENTS = "{{ f.arguments | tojson }}"
NAMED = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
TAGS = (
    "{% for k, v in f.arguments | items %}\n<parameter={{ k }}>\n"
    "{{ v if v is string else v | tojson }}\n</parameter>{% endfor %}"
)
CALLS = {
    "json": EACH + "\n<tool_call>\n" + NAMED + "\n</tool_call>{% endfor %}",
    "json, a list": "<calls>[" + EACH + NAMED + "{% if not loop.last %}, {% endif %}{% endfor %}]",
    "json, keys": EACH + '<call>{"{{ f.name }}": ' + JSON_ARGUMENTS + "}</call>{% endfor %}",
    "json, ids": EACH
    + '[CALL]{"id": "{{ c.id }}", "function": "{{ f.name }}", "parameters": '
    + JSON_ARGUMENTS
    + "}{% endfor %}",
    "json, bare": EACH + NAMED + "{% endfor %}",
    "json, text": EACH
    + '<call>{"name": "{{ f.name }}", "arguments": {{ "" + f.arguments }}}</call>{% endfor %}',
    "named": EACH + "[CALL]{{ f.name }}[ARGS]" + JSON_ARGUMENTS + "{% endfor %}",
    "named, index": EACH
    + "<call>functions.{{ f.name }}:{{ loop.index0 }}<args>"
    + JSON_ARGUMENTS
    + "</call>{% endfor %}",
    "named, id before": EACH
    + "<call>{{ c.id }}<name>{{ f.name }}<args>"
    + JSON_ARGUMENTS
    + "</call>{% endfor %}",
    "named, id after": EACH
    + "[CALL]{{ f.name }}[ID]{{ c.id }}[ARGS]"
    + JSON_ARGUMENTS
    + "{% endfor %}",
    "tagged": EACH + "\n<call>\n<function={{ f.name }}>" + TAGS
    + "\n</function>\n</call>{% endfor %}",
    "tagged, a section": "<calls>" + EACH + '\n<invoke name="{{ f.name }}">' + TAGS
    + "\n</invoke>{% endfor %}\n</calls>",
    "tagged, types": EACH
    + '<call name="{{ f.name }}">{% for k, v in f.arguments | items %}<arg name="{{ k }}" '
    'string="{{ "true" if v is string else "false" }}">{{ v if v is string else v | tojson }}'
    "</arg>{% endfor %}</call>{% endfor %}",
    "python": "<py>[" + EACH
    + "{{ f.name }}({% for k, v in f.arguments | items %}{{ k }}={{ v | tojson }}"
    "{{ '' if loop.last else ', ' }}{% endfor %}){{ '' if loop.last else ', ' }}{% endfor %}]</py>",
    "first alone": "{% set f = m.tool_calls[0].function %}<call>" + NAMED + "</call>",
}  # fmt: skip


def probe(calls: str, source: str = TURNS) -> ReplyProbe:
    return ReplyProbe(ChatTemplate(source.replace("CALLS", calls), {}), ["<|end|>"])


@pytest.mark.parametrize("name", CALLS)
def test_a_form_is_found_and_proved(name: str) -> None:
    found = probe(CALLS[name]).find()
    assert found.source == "probe"
    assert found.calls is not None
    assert found.calls.kind == (name.split(",", maxsplit=1)[0] if name != "first alone" else "json")


def test_what_does_not_prove_is_not_believed() -> None:
    lossy = EACH + "<call>{{ f.name }} {{ f.arguments | tojson | upper }}</call>{% endfor %}"
    cut = EACH + '<call>{"name": "{{ f.name }}", "arguments": {}}</call>{% endfor %}'
    for calls in (lossy, cut, "", "{{ raise_exception('no') }}"):
        found = probe(calls).find()
        assert (found.source, found.calls) == ("own", OWN_CALLS)


THINKS = TURNS.replace(
    "{{ m.content }}",
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}",
)


@pytest.mark.parametrize(
    ("source", "marks"),
    [
        (THINKS, ("<think>", "</think>")),
        (THINKS.replace("think>", "seed:think>"), ("<seed:think>", "</seed:think>")),
        (THINKS.replace("<think>", "<|o|>think<|s|>").replace("</think>", "<|c|>think<|s|>"),
         ("<|o|>think<|s|>", "<|c|>think<|s|>")),
        (TURNS + "{# <think> </think> #}", ("<think>", "</think>")),
        (TURNS, ("", "")),
    ],
)  # fmt: skip
def test_marks_of_reasoning(source: str, marks: tuple[str, str]) -> None:
    assert probe(CALLS["json"], source).find().reasoning == marks


def test_parts_that_a_template_shows() -> None:
    full, bare = probe(CALLS["json"]), probe("", CHATML)
    assert (full.shows_tools, full.shows_calls, full.shows_results, full.shows_system) == (
        True,
    ) * 4
    assert (bare.shows_tools, bare.shows_calls, bare.shows_results) == (False, False, True)
    strict = "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('x') }}{% endif %}"
    refusing = probe("", strict + "{{ m.content }}{% endfor %}")
    assert (refusing.shows_system, refusing.shows_results) == (False, False)


RESPONSE: Any = {
    "start_anchor": "<|assistant|>",
    "fields": {
        "content": {},
        "tool_calls": {
            "open": "<c>",
            "close": "</c>",
            "content": "json",
            "repeats": True,
            "transform": {
                "type": "function",
                "function": {"name": "{content.tool}", "arguments": "{content.input}"},
            },
        },
    },
}


def test_sources_come_in_an_order() -> None:
    known = probe(CALLS["json"], TURNS + "{# <|tool_list_start|> #}")
    assert known.find("mistral", RESPONSE).name == "mistral"
    told = known.find("", RESPONSE)
    assert (told.source, told.calls) == (
        "response_template",
        CallForm("json", call=("<c>", "</c>"), name_key="tool", arguments_key="input"),
    )
    assert (known.find().source, known.find().name) == ("known", "lfm2")
    with pytest.raises(HearthError, match="hermes") as caught:
        known.find("herms")
    assert (caught.value.code, caught.value.field) == ("invalid_value", "reply_format")
