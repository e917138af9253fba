from __future__ import annotations

import random
import socket as sockets
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from hearth.actors.arena import Arena
from hearth.actors.messages import Convert, Request
from hearth.daemon.door import faults, local_socket
from hearth.daemon.door.curve_socket import memory_of_process
from hearth.daemon.door.faults import explain, fields_of
from hearth.daemon.door.pictures import visuals_of
from hearth.daemon.door.sessions import Outbox, Session
from hearth.daemon.door.wire import MessageError, convert, decode, prepare
from hearth.runtime.errors import CODES, HearthError
from hearth.runtime.request import RequestOptions
from hearth.runtime.text.conversation import (
    MAX_DEPTH,
    MAX_VALUES,
    Conversation,
    ResponseFormat,
    Tool,
    ToolCall,
    Turn,
    TurnPart,
)
from hearth_client import Client, UnsupportedOption
from hearth_client.protocol import ClientMessage, Detokenize, Generate, Message, Tokenize
from tests.clients.vectors import load
from tests.daemon.door.harness import (
    BACKENDS,
    Harness,
    greet,
    hear,
    raw_client,
    running_door,
    say,
    until,
)
from tests.system.faults.raw_peer import (
    connected_peer,
    connection,
    has_ended,
    send_message,
    send_unfinished,
)

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
        (
            "messages",
            [{"role": 1}],
            "messages[0].role must be one of assistant, developer, system, tool, user",
        ),
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


@pytest.mark.parametrize("before", [{}, {"stop": ["x"] * 9, "seed": 1 << 62, "top_p": 0.5}])
@pytest.mark.parametrize("bracket", [b"\x91", b"\x81\xa1a", b"\xdd\x00\x00\x00\x01"])
def test_a_field_nested_too_deep_to_be_decoded_is_named_with_its_request(
    before: dict[str, Any], bracket: bytes
) -> None:
    head = encode({**GENERATE, **before})[1:] + encode("tools")
    whole = bytes([0x80 + 4 + len(before)]) + head + bracket * 100_000
    refused = refusal(whole)
    assert (refused.error.code, refused.error.field) == ("bad_message", "tools")
    assert refused.id == "a"


def test_a_message_of_many_items_above_what_is_nested_too_deep_is_not_searched_for_long() -> None:
    head = encode({**GENERATE, "stop": list(range(100_000))})[1:] + encode("tools")
    refused = refusal(b"\x85" + head + b"\x91" * 100_000)
    assert (refused.error.code, refused.error.field, refused.id) == ("bad_message", "stop", "a")


def session(*features: str) -> Session:
    return Session(1, 7, "test", 30.0, 0.0, Outbox(), features=frozenset(features))


def asked_by(message: Generate) -> Request:
    return prepare(message, [1], None, session(), {})


CALL = {"id": "c", "name": "f"}


def turns_with(arguments: Any) -> list[dict[str, Any]]:
    return [{"role": "assistant", "tool_calls": [{**CALL, "arguments": arguments}]}]


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 1


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ([0.5] * (MAX_VALUES - 19), [0.5] * (MAX_VALUES - 18)),
        (nested(MAX_DEPTH - 1), nested(MAX_DEPTH)),
    ],
    ids=["values", "depth"],
)
def test_arguments_have_bounds(good: Any, bad: Any) -> None:
    asked = {"t": "generate", "id": "a"}
    decode(encode({**asked, "messages": turns_with({"a": good})}))
    error = refusal({**asked, "messages": turns_with({"a": bad})}).error
    assert (error.code, error.field) == ("invalid_value", "messages[0].tool_calls[0].arguments")


def test_values_of_all_calls_and_tools_are_counted_together() -> None:
    calls = [{"id": str(number), "name": "f"} for number in range(120)]
    turns = [{"role": "assistant", "tool_calls": calls}] * 18
    error = refusal({"t": "generate", "id": "a", "messages": turns}).error
    assert (error.code, error.field) == ("invalid_value", "messages")
    many = [{"name": f"f{number}", "parameters": {"a": [0] * 400}} for number in range(100)]
    user = {"role": "user", "content": "x"}
    error = refusal({"t": "generate", "id": "a", "messages": [user], "tools": many}).error
    assert (error.code, error.field) == ("invalid_value", "tools[81].parameters")


def test_a_conversation_with_tools_becomes_what_the_tokenizer_is_asked() -> None:
    turns = [
        {"role": "developer", "content": "Be brief."},
        {"role": "assistant", "reasoning": "hm", "tool_calls": [{**CALL, "arguments": {"a": 1}}]},
        {"role": "tool", "content": "", "tool_call_id": "c"},
    ]
    tool = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
    asked = {"messages": turns, "tools": [tool], "tool_choice": {"name": "f"}}
    asked |= {"template": {"enable_thinking": False}, "parallel_tool_calls": False}
    means = Conversation(
        [
            Turn("developer", "Be brief."),
            Turn("assistant", reasoning="hm", tool_calls=[ToolCall("c", "f", {"a": 1})]),
            Turn("tool", tool_call_id="c"),
        ],
        [Tool("f", "d", {"type": "object"}, strict=True)],
        "=f",
        parallel_tool_calls=False,
        variables={"enable_thinking": False},
    )
    message = decode(encode({"t": "tokenize", "id": "a", **asked}))
    assert isinstance(message, Tokenize)
    assert convert(message, 1, 7).chat == means
    generate = decode(encode({"t": "generate", "id": "a", **asked, "reasoning_budget": 5}))
    assert isinstance(generate, Generate)
    assert asked_by(generate).chat == structs.replace(means, reasoning_budget=5)


@pytest.mark.parametrize(
    ("asked", "means"),
    [
        (None, None),
        ({"type": "json_object"}, ResponseFormat("json_object")),
        ({"type": "json_schema", "schema": True}, ResponseFormat("json_schema", schema=True)),
        ({"type": "json_schema", "schema": {}}, ResponseFormat("json_schema", schema={})),
        ({"type": "regex", "regex": "a"}, ResponseFormat("regex", grammar="a")),
        ({"type": "lark", "grammar": "b"}, ResponseFormat("lark", grammar="b")),
    ],
)
def test_the_form_of_an_answer_is_passed_on(asked: Any, means: ResponseFormat | None) -> None:
    message = decode(encode({**GENERATE, "response_format": asked}))
    assert isinstance(message, Generate)
    assert asked_by(message).response_format == means


def test_options_of_sampling_that_are_left_out_are_the_model_s_own_where_these_are_given() -> None:
    own = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    wanted = session("generation_defaults", "reasoning", "of-tomorrow")
    message = decode(encode({**GENERATE, "temperature": 0, "top_k": None, "seed": 1}))
    assert isinstance(message, Generate)
    assert prepare(message, [1], None, session(), own).options == RequestOptions(seed=1)
    asked = prepare(message, [1], None, wanted, own)
    assert asked.options == RequestOptions(seed=1, temperature=0.0, top_k=20, top_p=0.95)
    assert asked.features == ["reasoning"]


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
        [9, 10],
        12.5,
        session(),
        {},
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
    assert asked == Request(
        9, options, 2, 12.5, 7, chat=Conversation([Turn("user", "hi")]), siblings=[10]
    )
    seeded = asked_by(Generate(id="a", prompt="x", seed=0, speculation=False))
    assert seeded.options == RequestOptions(seed=0, speculation=False)


def test_every_option_of_generate_reaches_the_actors() -> None:
    """A field added to the protocol must be passed on or refused, never ignored."""
    passed = {"id", "messages", "prompt", "deadline_s", "priority", "timestamps", "traceparent"}
    passed |= {"tools", "tool_choice", "parallel_tool_calls", "template", "reasoning_budget"}
    passed |= {"response_format", "n"}
    # The tokenizer makes the grammar of these.
    asked = set(RequestOptions.__struct_fields__) - {"grammar"}
    assert set(Generate.__struct_fields__) == passed | asked


def test_conversions_become_what_the_tokenizer_is_asked() -> None:
    turns = [Message(role="user", content="hi")]
    assert convert(Tokenize(id="a", text=""), 1, 7) == Convert(1, text="", client=7)
    assert convert(Tokenize(id="a", messages=turns), 2, 7) == Convert(
        2, chat=Conversation([Turn("user", "hi")]), client=7
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
    asked = convert(message, 1, 7).chat
    assert asked is not None
    assert asked.turns == [Turn("system", "aa"), Turn("user", "", parts)]
    assert [field for field, _ in visuals_of(message.messages)] == [
        "messages[1].content[1]",
        "messages[1].content[2]",
    ]


@pytest.fixture(params=BACKENDS, ids=["asyncio", "uvloop"])
def door(request: pytest.FixtureRequest) -> Iterator[Harness]:
    with running_door(request.param) as harness:
        yield harness


def test_limits_of_clients_and_requests() -> None:
    with (
        running_door(clients=2, requests_per_client=2) as door,
        raw_client(door.path) as first,
        raw_client(door.path) as second,
        raw_client(door.path) as third,
    ):
        greet(first)
        greet(second)
        assert greet(third)["code"] == "too_many_clients"
        for request_id in "abc":
            say(first, {"t": "generate", "id": request_id, "prompt": "silent"})
        error = hear(first)
        assert (error["id"], error["code"]) == ("c", "too_many_requests")
        greet(first)  # a second hello leaves requests alone
        assert door.on_loop(lambda: door.door.open_requests) == 2


def test_an_open_id_is_not_ended_by_errors_about_others(door: Harness) -> None:
    with raw_client(door.path) as client:
        greet(client)
        say(client, {"t": "generate", "id": "a", "prompt": "hang"})
        assert hear(client)["t"] == "accepted"
        say(client, {"t": "generate", "id": "a", "prompt": "count"})
        error = hear(client)
        assert (error.get("id", ""), error["code"], error["field"]) == ("", "duplicate_id", "id")
        say(client, {"t": "generate", "id": "a", "prompt": "count", "top_p": 7})
        error = hear(client)
        assert (error.get("id", ""), error["field"]) == ("", "top_p")
        say(client, {"t": "cancel", "id": "a"})
        assert hear(client)["reason"] == "cancelled"


def test_frames_beyond_the_first_are_refused(door: Harness) -> None:
    good = {"t": "tokenize", "id": "t", "text": "Hi"}
    with raw_client(door.path) as client:
        greet(client)
        for extra in (1, 2, 999):
            say(client, good, *[b"x"] * extra)
            error = hear(client)
            assert (error["code"], error["field"]) == ("unsupported_option", "frames")
            assert error["id"] == "t"
        for frames in ([b""], [b"", b""], [b"", b"", b""]):
            say(client, *frames)
            while not (data := client.recv()):
                pass  # the delimiter comes back where one was sent
            code = msgspec.msgpack.decode(data)["code"]
            assert code == "bad_message"
        say(client, good)
        assert hear(client)["tokens"] == [72, 105]


def test_large_frames_are_answered_and_huge_ones_close_the_connection() -> None:
    with running_door(frame_bytes=1000) as door:
        with raw_client(door.path) as client:
            greet(client)
            say(client, {"t": "tokenize", "id": "t", "text": "x" * 1200})
            error = hear(client)
            assert (error["id"], error["code"]) == ("t", "message_too_large")
            say(client, b"x" * 5000)
            assert not client.poll(100)
        with Client(door.path) as other:
            assert other.tokenize("a") == [97]


def test_unfinished_messages_take_no_more_than_they_may_and_others_go_on() -> None:
    limits: dict[str, Any] = {"images_per_request": 4, "image_bytes": 16 << 20}
    limits["images_in_flight_bytes"] = 64 << 20
    arena = Arena.create("test", 1 << 18)
    with (
        running_door(client_memory_mb=48, arena=arena, **limits) as door,
        Client(door.path) as client,
        connected_peer(door.path) as little,
        connected_peer(door.path) as peer,
    ):
        generation = client.generate("hang")
        assert client.tokenize("a") == [97]
        before = memory_of_process()
        send_unfinished(little, 4, 1 << 20)
        with pytest.raises(OSError, match=r"Broken|reset"):
            send_unfinished(peer, 400, 1 << 20)
        assert memory_of_process() - before < 100 << 20
        until(lambda: door.totals()["connections_closed"] == 1)
        assert not ended(little)
        assert client.tokenize("a") == [97]
        generation.cancel()
        assert generation.text() == ""
    arena.close()


def test_a_message_of_too_many_bytes_closes_its_connection_alone(door: Harness) -> None:
    with Client(door.path) as client, connected_peer(door.path) as peer:
        assert client.tokenize("a") == [97]
        with pytest.raises(OSError, match=r"Broken|reset"):
            send_unfinished(peer, 400, 1 << 20)
        assert client.tokenize("a") == [97]
        assert door.totals()["connections_closed"] == 0


def test_connections_without_a_session_leave_for_newer_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local_socket, "STRANGERS", 5)
    with running_door(handshake_s=60.0) as door, Client(door.path) as client:
        generation = client.generate("hang")
        client.tokenize("a")
        silent = [connection(door.path) for _ in range(50)]
        until(lambda: sum(map(has_ended, silent)) == 45)
        assert not any(map(has_ended, silent[45:])), "the oldest go first"
        with Client(door.path) as other:
            assert other.tokenize("a") == [97]
            assert client.status().clients == 2
        generation.cancel()
        for one in silent:
            one.close()


def test_a_client_that_leaves_gives_its_place_free_at_once() -> None:
    with running_door(clients=2, lease_s=3600.0) as door:
        with raw_client(door.path) as one, raw_client(door.path) as two:
            greet(one)
            greet(two)
            say(two, {"t": "generate", "id": "g", "prompt": "hang"})
            assert hear(two)["t"] == "accepted"
        until(lambda: door.sessions() == 0)
        until(lambda: len(door.actors.cancelled) == 1)
        with raw_client(door.path) as third:
            assert greet(third)["t"] == "welcome"
        assert door.totals()["gone"] == 1


def test_a_place_is_free_for_who_comes_right_behind_who_leaves() -> None:
    with running_door(clients=1) as door:
        for _ in range(20):
            with connected_peer(door.path) as peer:
                # It leaves much to be read behind its hello.
                send_message(peer, msgspec.msgpack.encode({"t": "hello", "proto": [1]}))
                for _ in range(100):
                    send_message(peer, b"x" * 1000)
                until(lambda: door.sessions() == 1)
            with raw_client(door.path) as client:
                assert greet(client)["t"] == "welcome"
            until(lambda: door.sessions() == 0)


def test_a_place_is_kept_for_the_operator() -> None:
    with running_door(clients=1) as door, Client(door.path) as client:
        client.connect()
        with Client(door.path, status_only=True) as operator, raw_client(door.path) as other:
            assert operator.status().clients == 2
            with pytest.raises(UnsupportedOption):
                operator.generate("count").text()
            assert greet(other, status_only=True)["code"] == "too_many_clients"
        until(lambda: door.sessions() == 1)
        with raw_client(door.path) as other:
            greet(other, status_only=True)
            error = greet(other)
            assert (error["code"], error["field"]) == ("invalid_value", "status_only")


def test_nothing_but_hello_is_served_first(door: Harness) -> None:
    with raw_client(door.path) as client:
        for message in ({"t": "status", "id": "s"}, {"t": "lease"}, {"t": "cancel", "id": "s"}):
            say(client, message)
            assert hear(client)["code"] == "hello_required"
        say(client, {"t": "hello", "proto": [7]})
        error = hear(client)
        assert (error["code"], error["field"]) == ("unsupported_protocol", "proto")
        assert door.sessions() == 0


def ended(connection: sockets.socket) -> bool:
    """Whether the other side has closed a connection."""
    try:
        return not connection.recv(4096, sockets.MSG_DONTWAIT)
    except BlockingIOError:
        return False


def test_random_bytes_and_half_open_connections_do_no_harm() -> None:
    chance = random.Random(3)
    with running_door(handshake_s=0.3) as door, Client(door.path) as client:
        junk: list[sockets.socket] = []
        for number in range(60):
            connection = sockets.socket(sockets.AF_UNIX)
            connection.connect(str(door.path))
            if number % 3:  # every third says nothing at all
                connection.send(chance.randbytes(1 + chance.randrange(4096)))
            junk.append(connection)
        # A frame of the first ZeroMQ protocol, with an anonymous identity before it.
        junk[0].send(b"\x01\x00" + b"\x04\x00abc")
        assert client.generate("count", max_tokens=3).text() == "0 1 2 "
        until(lambda: all(ended(connection) for connection in junk[3::3]))
        for connection in junk:
            connection.close()
        assert client.tokenize("a") == [97]
        assert "internal_errors" not in door.totals()


def test_a_fault_of_ours_ends_one_message_and_not_the_service(
    door: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    with raw_client(door.path) as client:
        greet(client)
        with monkeypatch.context() as patched:
            patched.setattr(door.door._requests, "_ask", broken)
            say(client, {"t": "tokenize", "id": "t", "text": "a"})
            error = hear(client)
            assert (error["id"], error["code"]) == ("t", "internal")
            patched.setattr(door.door._tracker, "ask_tokenizer", broken)
            say(client, {"t": "generate", "id": "g", "prompt": "count"})
            error = hear(client)
            assert (error["id"], error["code"]) == ("g", "internal")
        assert door.totals()["internal_errors"] == 2
        say(client, {"t": "tokenize", "id": "t", "text": "a"})
        assert hear(client)["tokens"] == [97]
