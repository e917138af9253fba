import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from select import select
from threading import Timer
from typing import Any, cast

import click
import pytest
from click.testing import CliRunner, Result

from hearth.daemon.cli import chat as module
from hearth.daemon.shipped_files import EXAMPLE_HOME, home_format
from hearth_client import (
    ConnectionLost,
    Delta,
    Done,
    Generation,
    ImageInvalid,
    ImageUsage,
    PromptTooLong,
    Speculation,
    ToolCall,
    Usage,
    Welcome,
)
from hearth_client.protocol import Limits, Reason


class FakeGeneration:
    """Says `words` one by one; a cancel ends it."""

    def __init__(self, words: list[str]) -> None:
        self.done: Done | None = None
        self.interrupt_after: int | None = None
        self.lost_after: int | None = None
        self.reason: Reason = "stop"
        self.speculation: Speculation | None = None
        self.images: ImageUsage | None = None
        self.cached = 0
        self._words = words
        self._said: list[str] = []
        self._cancelled = False

    def __iter__(self) -> Iterator[Delta]:
        for number, word in enumerate(self._words):
            if self._cancelled:
                break
            self._said.append(word)
            yield Delta(id="1", seq=number, text=word, tokens=[number], reasoning=self.reasoning)
            if self.lost_after == number:
                raise ConnectionLost("the daemon closed the connection")
            if number == self.interrupt_after:
                os.kill(os.getpid(), signal.SIGINT)
        reason = "cancelled" if self._cancelled else self.reason
        count = len(self._said)
        usage = Usage(prompt_tokens=3, completion_tokens=count, cached_tokens=self.cached)
        self.done = Done(id="1", reason=reason, usage=usage)
        self.done.speculation, self.done.images = self.speculation, self.images

    request = "ab-1"

    def result(self) -> Done:
        assert self.done is not None
        return self.done

    def cancel(self) -> None:
        self._cancelled = True

    reasoning = ""
    tool_calls: Sequence[ToolCall] = ()

    def text(self) -> str:
        return "".join(self._said)


class FakeClient:
    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.words = ["It ", "is ", "on."]
        self.interrupt_after: int | None = None
        self.error: Exception | None = None
        self.lost_after: int | None = None
        self.reason: Reason = "stop"
        self.silence_s = 0.0
        self.cached = 0
        self.images: ImageUsage | None = None

        self.calls: dict[int, list[ToolCall]] = {}
        self.errors: dict[int, Exception] = {}
        self.reasoning = ""
        self.most_turns = 1 << 20
        self.model = "toy"
        self.features = ["response_format"]
        self.limits = Limits(
            frame_bytes=1 << 20,
            frames=9,
            requests_per_client=8,
            prompt_tokens=2000,
            total_tokens=2048,
            queued_requests=8,
            queued_tokens=8000,
            lease_s=30,
            images=8,
        )

    def connect(self) -> Welcome:
        return Welcome(
            proto=1, server="s", limits=self.limits, model=self.model, features=self.features
        )

    def generate(self, **request: Any) -> FakeGeneration:
        self.asked.append(request)
        number = len(self.asked) - 1
        if (error := self.errors.get(number, self.error)) is not None:
            raise error
        if len(request["messages"]) > self.most_turns:
            raise PromptTooLong("the prompt has too many tokens", "prompt")
        time.sleep(self.silence_s)
        generation = FakeGeneration(self.words)
        generation.lost_after, generation.reason = self.lost_after, self.reason
        generation.cached = self.cached
        generation.tool_calls = self.calls.get(number, [])
        generation.reasoning = self.reasoning
        generation.interrupt_after, generation.images = self.interrupt_after, self.images
        if request["speculation"]:
            generation.speculation = Speculation(rounds=2, drafted=8, accepted=5, accept_length=2.5)
        return generation


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    fake = FakeClient()

    @contextmanager
    def connected(_socket: str | None, _key: str | None, **how: Any) -> Iterator[FakeClient]:
        assert how == {"name": "hearth-chat", "wait": False}
        yield fake

    monkeypatch.setattr(module, "connected", connected)
    return fake


def chat(text: str, *arguments: str) -> Result:
    result = CliRunner().invoke(module.chat, arguments, input=text, standalone_mode=False)
    if result.exception:
        raise result.exception
    return result


def said(request: dict[str, Any]) -> list[Any]:
    return [turn["content"] for turn in request["messages"]]


def test_the_reply_is_printed_and_the_figures_are_not_part_of_it(client: FakeClient) -> None:
    result = chat("turn on the lamp\n")
    assert result.stdout == "It is on.\n"
    assert "3 tokens in " in result.stderr
    assert said(client.asked[0]) == ["turn on the lamp"]


def test_the_conversation_goes_on_and_commands_are_not_sent(client: FakeClient) -> None:
    chat("one\n/help\n\ntwo\n/reset\nthree\n/exit\nfour\n", "--system", "s")
    assert [said(request) for request in client.asked] == [
        ["s", "one"],
        ["s", "one", "It is on.", "two"],
        ["s", "three"],
    ]


def test_options_reach_the_request(client: FakeClient) -> None:
    chat("one\n", "--max-tokens", "9", "--temperature", "0.5", "--seed", "4", "--example")
    request = client.asked[0]
    assert (request["max_tokens"], request["temperature"], request["seed"]) == (9, 0.5, 4)
    assert said(request)[0] == EXAMPLE_HOME


@pytest.mark.parametrize(
    ("model", "arguments", "home", "held"),
    [
        ("home", [], True, True),
        ("toy", ["--example"], True, True),
        ("toy", [], False, False),
        ("home", ["--system", ""], False, False),
        ("home", ["--schema", "SCHEMA"], False, False),
        ("home", ["--tool", "TOOL", "--example"], True, False),
    ],
)
def test_the_shipped_model_has_the_example_home_and_a_form_of_its_devices(
    client: FakeClient, tmp_path: Path, *, model: str, arguments: list[str], home: bool, held: bool
) -> None:
    for name, value in (("TOOL", TOOL), ("SCHEMA", {"type": "integer"})):
        (tmp_path / name).write_text(json.dumps(value))
        arguments = [str(tmp_path / name) if one == name else one for one in arguments]
    client.model = model
    by_default = home and "--example" not in arguments
    result = chat("one\n/system -\ntwo\n", *arguments)
    assert (said(client.asked[0])[0] == EXAMPLE_HOME) is home
    form = client.asked[0].get("response_format")
    assert (form == home_format(EXAMPLE_HOME)) is held
    assert ("is told of an example home" in result.stderr) is by_default
    assert said(client.asked[1]) == ["two"]
    assert held is (client.asked[1].get("response_format") != form)


def test_it_is_said_where_nothing_holds_replies_to_the_devices(client: FakeClient) -> None:
    client.features = []
    result = chat("one\n", "--example")
    assert "llguidance" in result.stderr
    assert "response_format" not in client.asked[0]


def test_figures_are_one_line_and_stats_tells_the_rest(client: FakeClient) -> None:
    client.cached = 2
    assert "nothing has been answered yet" in chat("/stats\n").stderr
    said = chat("one\n", "--speculation").stderr
    assert "known before" not in said
    assert "a round" not in said
    told = chat("one\n/stats\n", "--speculation").stderr
    assert "3 tokens, 2 of them known before" in told
    assert "2.5 tokens" in told
    assert "ab-1" in told


def test_speculation_is_asked_for_declined_or_left_to_the_daemon(client: FakeClient) -> None:
    for arguments in ((), ("--no-speculation",), ("--speculation",)):
        chat("one\n", *arguments)
    assert [request["speculation"] for request in client.asked] == [None, False, True]


@pytest.mark.parametrize(
    ("lines", "most", "gone"),
    [(4, 5, ["the first question and its reply"] * 1), (12, 17, ["the first 2 questions"])],
)
def test_the_oldest_turns_leave_a_conversation_that_is_full(
    client: FakeClient, lines: int, most: int, gone: list[str]
) -> None:
    client.most_turns = most
    result = chat("".join(f"q{number}\n" for number in range(lines)))
    assert result.return_value == 0
    assert result.stdout.count("It is on.") == lines
    assert [one for one in gone if one not in result.stderr] == []
    assert "/reset forgets all" in result.stderr
    assert said(client.asked[-1])[-1] == f"q{lines - 1}"
    assert len(said(client.asked[-1])) <= most
    assert said(client.asked[-1])[0] != "q0"


def test_a_message_that_is_too_long_by_itself_leaves_the_conversation_as_it_was(
    client: FakeClient,
) -> None:
    class Pasted(FakeClient):
        def generate(self, **request: Any) -> FakeGeneration:
            self.most_turns = 0 if said(request)[-1] == "long" else 9
            return super().generate(**request)

    client.__class__ = Pasted
    result = chat("one\ntwo\nlong\nthree\n")
    assert said(client.asked[-1]) == ["one", "It is on.", "two", "It is on.", "three"]
    assert "what you said is not remembered" in result.stderr


def test_ctrl_c_cancels_the_reply_and_not_the_program(client: FakeClient) -> None:
    before = signal.getsignal(signal.SIGINT)
    client.interrupt_after = 1
    result = chat("one\ntwo\n")
    assert result.stdout == "It is \nIt is \n"
    assert result.stderr.count("cancelled, 2 tokens") == 2
    assert said(client.asked[1]) == ["one", "It is ", "two"]
    assert signal.getsignal(signal.SIGINT) is before


TOOL = {"name": "set_lamp", "parameters": {"type": "object"}}


def test_calls_are_shown_and_the_next_lines_are_their_results(
    client: FakeClient, tmp_path: Path
) -> None:
    (tmp_path / "one.json").write_text(json.dumps(TOOL))
    (tmp_path / "more.json").write_text(json.dumps([{"type": "function", "function": TOOL}] * 2))
    calls = [ToolCall(id=name, name=f"{name}[/]", arguments={"on": True}) for name in "ab"]
    client.calls = {0: calls}
    files = ("--tool", str(tmp_path / "one.json"), "--tool", str(tmp_path / "more.json"))
    result = chat("lamp on\n/stats\nit is\n\nthanks\n", *files, "--template", "x=false")
    assert result.stdout.startswith('It is on.\na[/] {"on": true}\nb[/] {"on": true}\nIt is on.')
    assert [request["tools"] for request in client.asked] == [[TOOL] * 3] * 3
    assert client.asked[0]["template"] == {"x": False}
    assert said(client.asked[1]) == ["lamp on", "It is on.", "it is", ""]
    assert said(client.asked[2])[-2:] == ["It is on.", "thanks"]


def test_a_question_whose_results_got_no_reply_is_forgotten(client: FakeClient) -> None:
    client.calls = {0: [ToolCall(id="a", name="f")]}
    client.errors = {1: PromptTooLong("it is too long", "prompt")}
    result = chat("one\nresult\ntwo\n")
    assert said(client.asked[2]) == ["two"]
    assert "not remembered" in result.stderr


def test_reasoning_is_folded(client: FakeClient) -> None:
    client.reasoning = "it wants light"
    result = chat("one\n/reasoning\n")
    assert result.stdout == "It is on.\n"
    assert "thinking ...\n" in result.stderr
    assert "3 words" in result.stderr
    assert "it wants light\n" in result.stderr


def test_options_that_are_not_given_are_left_to_the_model(
    client: FakeClient, tmp_path: Path
) -> None:
    (tmp_path / "s.json").write_text('{"type": "integer"}')
    chat("/set top_k 5\none\n", "--schema", str(tmp_path / "s.json"))
    request = dict(client.asked[0])
    del request["messages"]
    form = {"type": "json_schema", "schema": {"type": "integer"}}
    assert request == {
        "speculation": None,
        "adapter": "",
        "top_k": 5,
        "response_format": form,
    }


@pytest.mark.parametrize(
    ("flag", "text", "said"),
    [
        ("--tool", "5", "neither a tool nor a list"),
        ("--tool", "{", "is not JSON"),
        ("--schema", "", "is not JSON"),
        ("--schema", None, "cannot be read"),
        ("--template", None, "NAME=VALUE"),
    ],
)
def test_files_that_are_none_are_wrong_usage(
    client: FakeClient, flag: str, text: str | None, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(click.BadParameter, match=said):
        chat("one\n", flag, str(path))
    assert client.asked == []


def test_a_reply_without_text_is_no_turn_and_has_no_first_token(client: FakeClient) -> None:
    client.words, client.reason = [], "cancelled"
    result = chat("one\ntwo\n")
    assert "cancelled, 0 tokens\n" in result.stderr
    assert said(client.asked[1]) == ["two"]


def test_a_refused_request_is_one_line_and_the_chat_goes_on(client: FakeClient) -> None:
    client.error = PromptTooLong("[/] has 9 tokens, at most 8 are possible", "prompt")
    result = chat("one\ntwo\n")
    assert result.stderr.count("[/] has 9 tokens, at most 8 are possible") == 2
    assert said(client.asked[1]) == ["two"]
    assert result.return_value == 1


def test_an_error_stands_on_a_line_of_its_own(client: FakeClient) -> None:
    client.lost_after = 1
    result = chat("one\n")
    assert result.stdout == "It is \n"
    assert "the daemon closed the connection" in result.stderr


def test_a_reply_that_was_cut_says_so(client: FakeClient) -> None:
    assert "cut" not in chat("one\n").stderr
    client.reason = "length"
    assert "cut at 3 tokens" in chat("one\n", "--max-tokens", "3").stderr


def test_who_waits_for_the_daemon_is_told(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "waiting" not in chat("one\n").stderr
    monkeypatch.setattr(module, "_PATIENCE_S", 0.0)
    client.silence_s = 0.3
    assert "waiting for the daemon\n" in chat("one\n").stderr


def test_nobody_is_told_to_wait_once_the_reply_has_begun() -> None:
    told = Timer(60.0, pytest.fail)
    generation = FakeGeneration(["It ", "is"])
    generation.lost_after = 0
    with pytest.raises(ConnectionLost):
        module._stream(cast("Generation", generation), told)
    assert told.finished.is_set()


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_what_is_no_text_is_reported_as_it_is_of_a_file(errors: str) -> None:
    program = [sys.executable, "-c", "from hearth.daemon.cli.chat import _ask; _ask('')"]
    environ = {**os.environ, "PYTHONIOENCODING": f"utf-8:{errors}"}
    done = subprocess.run(program, input=b"\xff\n", capture_output=True, check=False, env=environ)
    assert done.stderr.endswith(b"Failure: the input is not utf-8 text: convert it first\n")


def test_keys_that_are_typed_during_a_reply_are_not_shown_in_it() -> None:
    code = """
import sys
from hearth.daemon.cli.chat import _keys_kept_back
with _keys_kept_back():
    print("reply", flush=True)
    sys.stdin.readline()
print("prompt", flush=True)
sys.stdin.readline()
"""
    master, terminal = os.openpty()
    with (
        os.fdopen(terminal, "rb", buffering=0) as stdin,
        os.fdopen(master, "r+b", buffering=0) as keyboard,
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=stdin, stdout=subprocess.PIPE
        ) as program,
    ):
        assert program.stdout is not None
        assert program.stdout.readline() == b"reply\n"
        keyboard.write(b"early\n")
        assert program.stdout.readline() == b"prompt\n"
        keyboard.write(b"late\n")
        assert program.wait(20) == 0
        assert select([keyboard], [], [], 5.0)[0], "keys are not shown any more"
        assert keyboard.read(100) == b"late\r\n"


def test_a_pipe_whose_lines_all_had_an_answer_ends_with_0(client: FakeClient) -> None:
    assert chat("one\n/help\ntwo\n").return_value == 0
    assert len(client.asked) == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ("--temperature", "101"),
        ("--temperature", "nan"),
        ("--seed", str(1 << 63)),
        ("--max-tokens", str((1 << 20) + 1)),
    ],
)
def test_values_that_no_daemon_takes_are_wrong_usage(
    client: FakeClient, arguments: tuple[str, str]
) -> None:
    with pytest.raises(click.UsageError, match=r"at most|not in the range"):
        chat("one\n", *arguments)
    assert client.asked == []


def test_example_and_system_exclude_each_other() -> None:
    result = CliRunner().invoke(module.chat, ["--example", "--system", "s"])
    assert result.exit_code == 2


def test_pictures_go_with_the_next_line_and_a_file_that_is_none_fails(
    client: FakeClient, tmp_path: Path
) -> None:
    picture, note = tmp_path / "a.png", tmp_path / "a.txt"
    picture.write_bytes(b"\x89PNG\r\n\x1a\n")
    note.write_text("no picture")
    client.images = ImageUsage(count=1, tokens=54)
    result = chat(f"/image {picture}\nwhat is it\n/stats\n")
    assert "pictures for the next message: 1" in result.stderr
    assert "pictures were 54 tokens" in result.stderr
    image, text = said(client.asked[0])[0]
    assert (image.frame, text, result.return_value) == (picture.read_bytes(), "what is it", 0)
    result = chat(f"/image {note}\nwhat is it\n")
    assert "a.txt: this is no JPEG" in result.stderr
    assert result.return_value == 1


def test_pictures_of_a_message_that_failed_stay_and_can_be_left_out(
    client: FakeClient, tmp_path: Path
) -> None:
    picture = tmp_path / "a.png"
    picture.write_bytes(b"\x89PNG\r\n\x1a\n")
    client.error = ImageInvalid("the picture is broken or cut off")
    result = chat(f"/image {picture}\nwhat is it\nand now\n/image -\nand now\n")
    assert [type(said(one)[0]) for one in client.asked] == [list, list, str]
    assert result.stderr.count("/image - forgets them") == 2
