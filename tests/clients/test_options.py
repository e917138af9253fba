import pytest

from hearth_client.errors import InvalidValue, UnsupportedOption
from hearth_client.options import GenerateOptions, as_messages, generate_request
from hearth_client.protocol import Generate, Message


def test_options_become_fields() -> None:
    request = generate_request("1", "x", None, {"max_tokens": 3, "stop": ["a"]})
    assert request == Generate(id="1", prompt="x", max_tokens=3, stop=["a"])


def test_unknown_options_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedOption) as caught:
        generate_request("1", "x", None, {"best_of": 2})
    assert caught.value.field == "best_of"


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("deadline", "deadline_s"), ("max_new_tokens", "max_tokens"), ("timeout", "deadline_s")],
)
def test_the_nearest_option_is_named(name: str, nearest: str) -> None:
    with pytest.raises(UnsupportedOption, match=f"nearest: {nearest}"):
        generate_request("1", "x", None, {name: 2})


def test_one_stop_text_is_a_list_of_it() -> None:
    assert generate_request("1", "x", None, {"stop": "\n"}).stop == ["\n"]


@pytest.mark.parametrize(("prompt", "messages"), [(None, None), ("x", [])])
def test_prompt_and_messages_exclude_each_other(
    prompt: str | None, messages: list[Message] | None
) -> None:
    with pytest.raises(InvalidValue, match="exactly one of them"):
        generate_request("1", prompt, messages, {})


def test_each_option_is_explained() -> None:
    text = GenerateOptions.__doc__ or ""
    assert [name for name in GenerateOptions.__annotations__ if name not in text] == []


def test_every_field_of_generate_is_an_option() -> None:
    assert {"id", "prompt", "messages", *GenerateOptions.__annotations__} == set(
        Generate.__struct_fields__
    )


def test_messages_may_be_structs_or_mappings() -> None:
    turn = Message(role="user", content="hi")
    assert as_messages([turn, {"role": "user", "content": "hi"}]) == ([turn, turn], [])
    with pytest.raises(InvalidValue) as caught:
        as_messages([turn, {"role": "user"}])
    assert caught.value.field == "messages[1]"
