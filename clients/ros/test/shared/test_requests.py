import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ros_messages import fields, make

from hearth_client import GenerateOptions, HearthClientError
from hearth_ros.images import picture_of
from hearth_ros.requests import ask_of, read_tools, tools_of, turns_of, with_picture
from hearth_ros.talk import Call, Outcome, Piece, fill

SCHEMA = {"type": "object", "properties": {"on": {"type": "boolean"}}}
USER = make("Turn", role="user", content="hi")


def goal(**values: Any) -> Any:
    return make("Generate", **({"messages": [USER]} | values))


def test_a_goal_of_nothing_but_turns_leaves_every_option_out() -> None:
    ask = ask_of(goal())
    assert (ask.prompt, ask.turns) == (None, [{"role": "user", "content": "hi"}])
    assert (ask.tools, ask.options) == ([], {})


def test_options_go_by_their_names() -> None:
    ask = ask_of(
        goal(
            max_tokens=8,
            temperature=0.5,
            top_k=3,
            top_p=0.9,
            min_p=0.1,
            seed=7,
            stop=["."],
            adapter="spoken",
            priority=-1,
            deadline_s=2.5,
            tool_choice="set_lamp",
            response_format='{"type": "regex", "regex": "a+"}',
            options='{"ignore_eos": true}',
        )
    )
    assert ask.options == {
        "max_tokens": 8,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 7,
        "stop": ["."],
        "adapter": "spoken",
        "priority": -1,
        "deadline_s": 2.5,
        "tool_choice": {"name": "set_lamp"},
        "response_format": {"type": "regex", "regex": "a+"},
        "ignore_eos": True,
    }
    assert ask.options.keys() <= GenerateOptions.__annotations__.keys()


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"prompt": "a"}, "prompt"),
        ({"messages": []}, "prompt"),
        ({"options": "[1]"}, "options"),
        ({"options": '{"n": 2}'}, "n"),
        ({"options": '{"logprobs": 2}'}, "logprobs"),
        ({"options": '{"max_tokens": 2}'}, "options.max_tokens"),
        ({"options": '{"tools": []}'}, "options.tools"),
        ({"response_format": "json"}, "response_format"),
        ({"tools": [make("Tool", name="a", parameters="{")]}, "tools[0].parameters"),
        ({"tools": [make("Tool", name="a", service_type="x/Y")]}, "tools[0].service_type"),
        (
            {
                "messages": [
                    make("Turn", role="assistant", tool_calls=[make("ToolCall", arguments="1")])
                ]
            },
            "messages[0].tool_calls[0].arguments",
        ),
    ],
)
def test_what_is_wrong_is_named(values: dict[str, Any], field: str) -> None:
    with pytest.raises(HearthClientError) as caught:
        ask_of(goal(**values))
    assert caught.value.field == field


def test_a_conversation_with_a_call_its_result_and_a_picture() -> None:
    image = make("Turn", role="user", content="And this?")
    jpeg = type("CompressedImage", (), {"format": "jpeg", "data": b"\xff\xd8\xff"})()
    image.compressed_images = [jpeg]
    call = make("ToolCall", id="c1", name="set_lamp", arguments='{"on": true}')
    turns = turns_of(
        [
            make("Turn", role="assistant", reasoning="hm", tool_calls=[call]),
            make("Turn", role="tool", tool_call_id="c1"),
            image,
        ]
    )
    called = {"id": "c1", "name": "set_lamp", "arguments": {"on": True}}
    assert turns[:2] == [
        {"role": "assistant", "reasoning": "hm", "tool_calls": [called]},
        {"role": "tool", "content": "", "tool_call_id": "c1"},
    ]
    assert isinstance(turns[2], dict)
    picture, text = turns[2]["content"]
    assert (picture.says, text) == ({"format": "jpeg"}, "And this?")
    seen = with_picture(turns[2], picture_of(jpeg))
    assert isinstance(seen, dict)
    assert len(seen["content"]) == 3
    with pytest.raises(HearthClientError, match="the user's"):
        with_picture(turns[1], picture)


def test_tools_of_a_file_are_those_of_a_goal(tmp_path: Path) -> None:
    path = tmp_path / "tools.json"
    declared = {"name": "set_lamp", "description": "d", "service": "/lamp", "strict": True}
    path.write_text(json.dumps([declared | {"parameters": SCHEMA}]))
    told = make("Tool", **declared, parameters=json.dumps(SCHEMA))
    assert read_tools(str(path)) == tools_of([told])
    assert read_tools(str(path))[0].service_type == "hearth_msgs/CallTool"
    assert read_tools("") == []


@pytest.mark.parametrize("text", [None, "{}", '[{"name": 1}]', '[{"name": "a", "url": "b"}]', "["])
def test_a_file_that_is_no_list_of_tools_is_refused(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "tools.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(HearthClientError) as caught:
        read_tools(str(path))
    assert caught.value.field == "tools_file"


@pytest.mark.parametrize(
    ("struct", "name", "part"),
    [
        (Outcome(), "Generate", 1),
        (Piece(seq=0, round=0), "Generate", 2),
        (Call("", "", ""), "ToolCall", 0),
    ],
)
def test_structs_have_the_fields_of_their_messages(
    struct: msgspec.Struct, name: str, part: int
) -> None:
    assert list(struct.__struct_fields__) == list(fields(name, part))


def test_a_message_is_filled_by_names() -> None:
    message = make("ToolCall")
    outcome = Outcome(text="a", tool_calls=[Call("c1", "f", "{}")])
    filled = fill(message, outcome, lambda **values: make("ToolCall", **values))
    assert filled.text == "a"
    assert filled.tool_calls == [make("ToolCall", id="c1", name="f", arguments="{}")]
    assert fill(message, {"text": "b"}, make).text == "b"
