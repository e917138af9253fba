from typing import Any

import pytest

from hearth.runtime.text.reply_format import CallForm
from hearth.runtime.text.response_template import read_response_template

NAME = r"(?P<name>\w+)"
GIVEN = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}


def template(**fields: Any) -> dict[str, Any]:
    return {"start_anchor": "<|assistant|>", "fields": {"content": {}, **fields}}


def calls(**field: Any) -> dict[str, Any]:
    return template(tool_calls={"repeats": True, **field})


FORMS = [
    (
        calls(open="[CALLS]", close="<end>", content="json", transform_each=True,
              transform={"function": {"name": "{name}", "arguments": "{arguments}"}}),
        CallForm("json", section=("[CALLS][", "]<end>"), separator=", "),
    ),
    (
        calls(open_pattern=rf"<function={NAME}>", close="</function>", content="json",
              transform=GIVEN),
        CallForm("named", call=("<function=", "</function>"), name_close=">"),
    ),
    (
        calls(open_pattern=rf"<call>\s*<function={NAME}>\n", close="</call>", content="xml-inline",
              content_args={"tag_pattern": r"<p=(?P<key>\w+)>\n(?P<value>.*?)\n</p>"},
              transform=GIVEN),
        CallForm("tagged", call=("<call>\n<function=", "</call>"), name_close=">\n",
                 key_open="<p=", key_close=">\n", value_close="\n</p>"),
    ),
    (
        calls(open_pattern=rf"<\|call>call:{NAME}", close="<call|>", content="json",
              content_args={"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
              transform=GIVEN),
        CallForm("bare", call=("<|call>call:", "<call|>"), quote='<|"|>'),
    ),
    (
        calls(open="<|start|>", close="<|stop|>", content="python-call-list"),
        CallForm("python", section=("<|start|>[", "]<|stop|>"), separator=", "),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("source", "form"), FORMS)
def test_forms_of_calls(source: dict[str, Any], form: CallForm) -> None:
    found = read_response_template(source)
    assert found is not None
    assert found.calls == form


def test_marks_of_reasoning() -> None:
    found = read_response_template(template(thinking={"open": "<think>", "close": "</think>"}))
    assert found is not None
    assert (found.reasoning, found.calls) == (("<think>", "</think>"), None)


@pytest.mark.parametrize(
    "source",
    [
        None, [], {}, {"fields": []}, {"version": 2, "fields": {}}, calls(open="<c>"),
        calls(open="<c>", content="json"), template(tool_calls=[]), template(thinking=7),
        calls(open_pattern="<c>(a|b)", close="x", content="json", transform=GIVEN),
        calls(open_pattern=rf"<c>{NAME}", close="x", content="kv-lines", transform=GIVEN),
        calls(open_pattern=rf"<c>{NAME}", close="x", content="json", transform={}),
    ],
)  # fmt: skip
def test_more_than_a_format_can_say_is_left_to_other_sources(source: Any) -> None:
    assert read_response_template(source) is None
