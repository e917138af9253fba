import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from hearth.actors.logs import LossyStream, certain_log, configure_logging, request_id
from hearth.actors.settings import Level

FULL = Path("/dev/full")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def test_off_a_terminal_each_event_is_one_json_line() -> None:
    stream = io.StringIO()
    configure_logging("info", stream=stream, environ={})
    structlog.get_logger().info("request done", rid=7, tokens=[1, 2], path=sys)
    line = json.loads(stream.getvalue())
    assert list(line)[:3] == ["timestamp", "level", "event"]
    assert (line["level"], line["event"], line["rid"]) == ("info", "request done", 7)
    assert line["timestamp"].endswith("Z")


def test_a_request_is_called_by_its_id_where_the_daemon_told_its_epoch() -> None:
    stream = io.StringIO()
    configure_logging("info", "json", stream=stream, environ={})
    structlog.get_logger().info("before", rid=7)
    with structlog.contextvars.bound_contextvars(epoch="b09922ff004cf43d"):
        structlog.get_logger().info("inside", rid=7)
        structlog.get_logger().info("several", rids=[7, 8])
    before, inside, several = map(json.loads, stream.getvalue().splitlines())
    assert several["requests"] == ["b09922ff-7", "b09922ff-8"]
    assert before["rid"] == 7
    assert inside["request"] == request_id("b09922ff004cf43d", 7) == "b09922ff-7"
    assert not {"epoch", "rid"} & inside.keys()


def test_events_below_the_level_are_dropped() -> None:
    stream = io.StringIO()
    configure_logging("warning", stream=stream, environ={})
    structlog.get_logger().info("quiet")
    assert stream.getvalue() == ""


def test_a_terminal_gets_coloured_text_unless_no_color_is_set() -> None:
    coloured, plain = Terminal(), Terminal()
    configure_logging("info", stream=coloured, environ={})
    structlog.get_logger().info("ready", socket="/x")
    configure_logging("info", stream=plain, environ={"NO_COLOR": "1"})
    structlog.get_logger().info("ready", socket="/x")
    assert "\x1b[" in coloured.getvalue()
    assert "\x1b[" not in plain.getvalue()
    assert "ready" in plain.getvalue()
    assert "socket=/x" in plain.getvalue()


def test_what_a_client_has_written_steers_no_terminal() -> None:
    stream = io.StringIO()
    configure_logging("info", "console", stream=stream, environ={})
    structlog.get_logger().info("request", client="a\x1b]0;title\x07b\u009b2J\u202ec", text="ü")
    assert "client=a\ufffd]0;title\ufffdb\ufffd2J\ufffdc" in stream.getvalue()
    assert "text=ü" in stream.getvalue()


def test_numbers_are_rounded_for_people_and_whole_for_programs() -> None:
    numbers = {"seconds": 0.45583012, "error": 1.3371e-05, "total": 12345.678, "off": -0.50049}
    console, programs = io.StringIO(), io.StringIO()
    configure_logging("info", "console", stream=console, environ={})
    structlog.get_logger().info("x", **numbers, rid=123456, lost=float("nan"))
    configure_logging("info", "json", stream=programs, environ={})
    structlog.get_logger().info("x", **numbers)
    told = dict(word.split("=") for word in console.getvalue().split() if "=" in word)
    assert told == {
        "seconds": "0.456",
        "error": "1.34e-05",
        "total": "12346",
        "off": "-0.5",
        "rid": "123456",
        "lost": "nan",
    }
    assert {key: json.loads(programs.getvalue())[key] for key in numbers} == numbers


@pytest.mark.parametrize("form", ["console", "json"])
def test_a_traceback_shows_no_local_variables(form: str) -> None:
    stream = io.StringIO()
    configure_logging("info", form, stream=stream, environ={})  # type: ignore[arg-type] # a literal
    said = "what the user " + "said"
    try:
        int(said[:0])
    except ValueError:
        structlog.get_logger().exception("failed")
    assert "ValueError" in stream.getvalue()
    assert "what the user said" not in stream.getvalue()


def test_a_log_whose_reader_has_gone_harms_nobody() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        configure_logging("info", "json", stream=stream, environ={})
        structlog.get_logger().info("nobody hears this")


@pytest.mark.skipif(not FULL.exists(), reason="the system has no full device")
def test_a_full_disk_harms_nobody() -> None:
    with FULL.open("w") as stream:
        configure_logging("info", "json", stream=stream, environ={})
        structlog.get_logger().info("this fits nowhere")


def test_a_long_line_for_a_reader_that_is_behind_is_cut_short_and_begins_no_other() -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb", buffering=0) as read, os.fdopen(writer, "w") as stream:
        os.set_blocking(reader, False)
        log = LossyStream(stream, "lost {}\n")
        for _ in range(60):
            log.write("x" * 999 + "\n")
        log.write("y" * 20_000 + "\n")
        log.write("z\n")
        text = b""
        while chunk := read.read(65536):
            text += chunk
        log.write("back\n")
        assert b"yyy" in text
        assert text[-1:] == b"y"
        assert read.read(65536) == b"\nlost 2\nback\n"


def test_a_long_line_comes_whole_through_a_pipe_that_has_room() -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb", buffering=0) as read, os.fdopen(writer, "w") as stream:
        line = "ä" * 20_000 + "\n"
        LossyStream(stream, "").write(line)
        assert read.read(65536).decode() == line


def test_a_reader_that_is_behind_loses_lines_and_is_told_how_many() -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb", buffering=0) as read, os.fdopen(writer, "w") as stream:
        os.set_blocking(reader, False)
        log = configure_logging("info", "json", stream=stream, environ={})
        for number in range(400):
            structlog.get_logger().info("x" * 1000, number=number)
        text = b""
        while chunk := read.read(65536):
            text += chunk
        heard = text.count(b"\n")
        assert 0 < heard < 400
        structlog.get_logger().info("back")
        told, back = map(json.loads, (read.read(65536) or b"").splitlines())
        assert (told["event"], told["lines"]) == ("lines of the log were lost", 400 - heard)
        assert back["event"] == "back"
        assert log.all_lost == 400 - heard


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_what_an_operator_waits_for_is_told_at_every_level(level: Level) -> None:
    stream = io.StringIO()
    configure_logging(level, stream=stream, environ={})
    structlog.get_logger().debug("detail")
    certain_log("hearth").info("ready", batch=8)
    line = json.loads(stream.getvalue().splitlines()[-1])
    assert (line["level"], line["event"], line["batch"]) == ("info", "ready", 8)
    assert stream.getvalue().count("\n") == (2 if level == "debug" else 1)
