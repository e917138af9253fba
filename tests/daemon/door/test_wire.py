import random
from collections.abc import Callable
from itertools import count
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.actors.messages import ChatTurn, Convert, Request, TurnPart
from hearth.daemon.door import faults
from hearth.daemon.door.faults import explain, fields_of
from hearth.daemon.door.wire import MessageError, convert, decode, prepare, visuals_of
from hearth.runtime.errors import CODES, HearthError
from hearth.runtime.request import RequestOptions
from hearth_client.protocol import ClientMessage, Detokenize, Generate, Message, Tokenize
from tests.clients.vectors import load

encode = msgspec.msgpack.encode
GENERATE = {"t": "generate", "id": "a", "prompt": "x"}


def refusal(message: Any) -> MessageError:
    with pytest.raises(MessageError) as caught:
        decode(message if isinstance(message, bytes) else encode(message))
    return caught.value


@pytest.mark.parametrize("vector", load("requests"), ids=lambda vector: vector["name"])
def test_requests_mean_what_the_vectors_say(vector: dict[str, Any]) -> None:
    message = decode(bytes.fromhex(vector["hex"]))
    means = vector.get("means", vector["message"])
    assert msgspec.json.decode(msgspec.json.encode(message)) == means


@pytest.mark.parametrize("vector", load("malformed"), ids=lambda vector: vector["name"])
def test_malformed_messages_get_code_field_and_id(vector: dict[str, Any]) -> None:
    refused = refusal(bytes.fromhex(vector["hex"]))
    answer = {"code": refused.error.code, "field": refused.error.field or "", "id": refused.id}
    assert answer == vector["error"]


def test_sentences_are_ours_and_name_the_field() -> None:
    for field, value, sentence in (
        ("max_tokens", 0, "max_tokens must be a whole number from 1 to 1048576"),
        ("top_p", 2, "top_p must be a number above 0.0 to 1.0"),
        ("stop", ["a", ""], "stop[1] must be text of 1 to 256 characters"),
        ("stop", 5, "stop must be a list of 0 to 16 items"),
        ("logit_bias", [5], "logit_bias[0] must be a list of 2 items"),
        ("ignore_eos", 1, "ignore_eos must be true or false"),
        ("speculation", 1, "speculation must be true or false"),
        ("messages", [5], "messages[0] must be a map of its fields"),
        ("messages", [{"role": 1}], "messages[0].role must be one of assistant, system, user"),
    ):
        assert refusal({**GENERATE, field: value}).error.message == sentence


def test_the_fault_in_a_list_is_found_where_it_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "EXPLAIN_S", 60.0)
    biases: list[Any] = [[token, 0.5] for token in range(1024)]
    biases[1001] = [1001, 200.0]
    biases[1010] = []
    assert refusal({**GENERATE, "logit_bias": biases}).error.message == (
        "logit_bias[1001][1] must be a number from -100.0 to 100.0"
    )
    assert refusal({**GENERATE, "logit_bias": biases * 2}).error.message == (
        "logit_bias must be a list of 0 to 1024 items"
    )
    tokens = [*range(65_535), "x"]
    refused = refusal({"t": "detokenize", "id": "a", "tokens": tokens}).error
    assert (refused.code, refused.field) == ("bad_message", "tokens")


@pytest.mark.parametrize(
    ("clock", "code", "field"),
    [
        (lambda: 0.0, "invalid_value", "messages[199].content[200].text"),
        # Late from the first look on, or once there have been some.
        (count(0, 1).__next__, "bad_message", "messages"),
        (count(0, faults.EXPLAIN_S / 300).__next__, "bad_message", "messages[199].content"),
    ],
)
def test_a_fault_is_looked_for_as_long_as_there_is_time(
    clock: Callable[[], float], code: str, field: str
) -> None:
    turns = [{"role": "user", "content": [{"type": "text", "text": "x"}] * 200} for _ in range(200)]
    turns[199] = {"role": "user", "content": [*turns[0]["content"], {"type": "text", "text": 5}]}
    found = explain(fields_of(encode({**GENERATE, "messages": turns})), clock)
    assert (found.code, found.field) == (code, field)


def test_the_largest_field_is_at_fault_where_the_others_are_not() -> None:
    turns = [{"role": "user", "content": "x" * 100}] * 200
    late = count(0, 1).__next__
    found = explain(fields_of(encode({**GENERATE, "messages": turns, "top_p": 2})), late)
    assert (found.code, found.field) == ("invalid_value", "top_p")


def test_hostile_bytes_are_refused_quickly_and_by_name() -> None:
    deep = b"\x83\xa1t\xa8generate\xa2id\xa1a\xa8messages" + b"\x91" * 100_000
    assert refusal(deep).error.code == "bad_message"
    assert refusal(b"\x81\xa1t" + b"\x91" * 100_000).error.code == "bad_message"
    huge = b"\x83\xa1t\xa8generate\xa2id\xa1a\xa4stop\xdd\xff\xff\xff\xff"
    assert refusal(huge).error.code == "bad_message"
    assert refusal({**GENERATE, "stop": ["s"] * 10_000}).error.field == "stop"
    long = refusal({**GENERATE, "n" * 100_000: 1}).error
    assert len(long.message) < 200
    assert long.code == "unsupported_option"


def test_names_with_quotes_stay_names() -> None:
    for name in ("` - at `$.id`", "a`b", "", "\n"):
        error = refusal({**GENERATE, name: 1}).error
        assert error.code in {"unsupported_option", "invalid_value", "bad_message"}


def mutate(data: bytes, chance: random.Random) -> bytes:
    mutated = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(mutated) + 1)
        action = chance.randrange(4)
        if action == 0:
            mutated[at : at + 1] = bytes([chance.randrange(256)])
        elif action == 1:
            mutated[at:at] = chance.randbytes(chance.randint(1, 3))
        elif action == 2:
            del mutated[at : at + chance.randint(1, 5)]
        else:
            mutated[at:at] = chance.choice((b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff", b"\x91" * 99))
    return bytes(mutated)


def refused_with(data: bytes) -> HearthError | None:
    try:
        decode(data)
    except MessageError as refused:
        return refused.error
    return None


def test_mutated_messages_raise_nothing_but_refusals() -> None:
    chance = random.Random(2024)
    seeds = [bytes.fromhex(v["hex"]) for v in load("requests") + load("malformed")]
    errors = [refused_with(mutate(chance.choice(seeds), chance)) for _ in range(20_000)]
    refused = [error for error in errors if error is not None]
    assert 10_000 < len(refused) < 20_000
    assert {error.code for error in refused} <= CODES
    # What the decoder refuses, the explanation finds.
    assert not [error for error in refused if error.message == "the message cannot be decoded"]


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    error = refused_with(data)
    assert error is None or error.code in CODES


def test_a_message_in_which_nothing_wrong_is_found_is_still_refused() -> None:
    assert explain(fields_of(encode(GENERATE))).code == "bad_message"


def test_the_sentence_does_not_depend_on_the_decoder_s_words() -> None:
    for field, value in (("max_tokens", 1 << 63), ("seed", True), ("temperature", "0.5")):
        assert refusal({**GENERATE, field: value}).error.field == field
    assert refusal({"t": "hello", "proto": [1.5]}).error.message == (
        "proto[0] must be a whole number"
    )


def test_generations_become_what_the_tokenizer_is_asked() -> None:
    asked = prepare(
        Generate(
            id="a",
            messages=[Message(role="user", content="hi")],
            max_tokens=7,
            temperature=0.5,
            logit_bias=[(3, 1.5)],
            stop=["END"],
            logprobs=0,
            seed=77,
            ignore_eos=True,
            priority=2,
        ),
        rid=9,
        deadline=12.5,
        client=4,
    )
    options = RequestOptions(
        max_tokens=7,
        temperature=0.5,
        logit_bias=((3, 1.5),),
        seed=77,
        stop=("END",),
        logprobs=0,
        ignore_eos=True,
    )
    assert asked == Request(9, options, 2, 12.5, 4, turns=[ChatTurn("user", "hi")])
    seeded = prepare(Generate(id="a", prompt="x", seed=0, speculation=False), 1, None, 1)
    assert seeded.options == RequestOptions(seed=0, speculation=False)


def test_every_option_of_generate_reaches_the_actors() -> None:
    """A field added to the protocol must be passed on or refused, never ignored."""
    passed = {"id", "messages", "prompt", "deadline_s", "priority", "timestamps", "traceparent"}
    assert set(Generate.__struct_fields__) == passed | set(RequestOptions.__struct_fields__)


def test_conversions_become_what_the_tokenizer_is_asked() -> None:
    turns = [Message(role="user", content="hi")]
    assert convert(Tokenize(id="a", text=""), 1, 7) == Convert(1, text="", client=7)
    assert convert(Tokenize(id="a", messages=turns), 2, 7) == Convert(
        2, turns=[ChatTurn("user", "hi")], client=7
    )
    assert convert(Detokenize(id="a", tokens=[5]), 3, 7) == Convert(3, tokens=[5], client=7)


def test_the_decoder_knows_every_request() -> None:
    names = {kind.__struct_config__.tag for kind in ClientMessage.__args__}
    assert names == {vector["message"]["t"] for vector in load("requests")}


TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


@pytest.mark.parametrize(
    "text",
    [
        f"00-{TRACE}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-00",
        f"01-{TRACE}-{PARENT}-ff",
        f"cc-{TRACE}-{PARENT}-01-what.will.be",
    ],
)
def test_a_place_in_a_trace_has_the_form_of_w3c(text: str) -> None:
    message = decode(encode({**GENERATE, "traceparent": text}))
    assert isinstance(message, Generate)
    assert message.traceparent == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        f"00-{TRACE}-{PARENT}",
        f"00-{TRACE}-{PARENT}-1",
        f"00-{TRACE}-{PARENT}-01-more",
        f"00-{TRACE}-{PARENT}-01\n",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{TRACE[:-1]}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-01" + "-" + "x" * 256,
    ],
)
def test_any_other_form_is_refused_by_name(text: str) -> None:
    error = refusal({**GENERATE, "traceparent": text}).error
    assert (error.code, error.field) == ("invalid_value", "traceparent")


def test_turns_of_parts_keep_their_order_and_text_alone_is_joined() -> None:
    text, image = {"type": "text", "text": "a"}, {"type": "image", "frame": 1, "format": "png"}
    video = {"type": "video", "frames": [{"frame": 1, "format": "gif", "time_s": 0}]}
    turns = [
        {"role": "system", "content": [text, text]},
        {"role": "user", "content": [text, video, image]},
    ]
    message = decode(encode({"t": "tokenize", "id": "a", "messages": turns}))
    assert isinstance(message, Tokenize)
    parts = [TurnPart("text", "a"), TurnPart("video"), TurnPart("image")]
    assert convert(message, 1, 7).turns == [ChatTurn("system", "aa"), ChatTurn("user", "", parts)]
    assert [field for field, _ in visuals_of(message.messages)] == [
        "messages[1].content[1]",
        "messages[1].content[2]",
    ]
