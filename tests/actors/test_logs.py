from __future__ import annotations

import io
import json
import os
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest
import structlog

from hearth.actors.logs import (
    Journal,
    LossyStream,
    certain_log,
    configure_logging,
    leads_to_journald,
    request_id,
)
from hearth.actors.settings import Level

FULL = Path("/dev/full")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def _restore() -> Iterator[None]:
    yield
    structlog.reset_defaults()


@pytest.mark.usefixtures("_restore")
def test_off_a_terminal_each_event_is_one_json_line() -> None:
    stream = io.StringIO()
    configure_logging("info", stream=stream, environ={})
    structlog.get_logger().info("request done", rid=7, tokens=[1, 2], path=sys)
    line = json.loads(stream.getvalue())
    assert list(line)[:3] == ["timestamp", "level", "event"]
    assert (line["level"], line["event"], line["rid"]) == ("info", "request done", 7)
    assert line["timestamp"].endswith("Z")


@pytest.mark.usefixtures("_restore")
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


@pytest.mark.usefixtures("_restore")
def test_events_below_the_level_are_dropped() -> None:
    stream = io.StringIO()
    configure_logging("warning", stream=stream, environ={})
    structlog.get_logger().info("quiet")
    assert stream.getvalue() == ""


@pytest.mark.usefixtures("_restore")
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


@pytest.mark.usefixtures("_restore")
def test_what_a_client_has_written_steers_no_terminal() -> None:
    stream = io.StringIO()
    configure_logging("info", "console", stream=stream, environ={})
    structlog.get_logger().info("request", client="a\x1b]0;title\x07b\u009b2J\u202ec", text="ü")
    assert "client=a\ufffd]0;title\ufffdb\ufffd2J\ufffdc" in stream.getvalue()
    assert "text=ü" in stream.getvalue()


@pytest.mark.usefixtures("_restore")
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


@pytest.mark.usefixtures("_restore")
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


@pytest.mark.usefixtures("_restore")
def test_a_log_whose_reader_has_gone_harms_nobody() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        configure_logging("info", "json", stream=stream, environ={})
        structlog.get_logger().info("nobody hears this")


@pytest.mark.usefixtures("_restore")
@pytest.mark.skipif(not FULL.exists(), reason="the system has no full device")
def test_a_full_disk_harms_nobody() -> None:
    with FULL.open("w") as stream:
        configure_logging("info", "json", stream=stream, environ={})
        structlog.get_logger().info("this fits nowhere")


@pytest.mark.usefixtures("_restore")
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


@pytest.mark.usefixtures("_restore")
def test_a_long_line_comes_whole_through_a_pipe_that_has_room() -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb", buffering=0) as read, os.fdopen(writer, "w") as stream:
        line = "ä" * 20_000 + "\n"
        LossyStream(stream, "").write(line)
        assert read.read(65536).decode() == line


@pytest.mark.usefixtures("_restore")
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


@pytest.mark.usefixtures("_restore")
@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_what_an_operator_waits_for_is_told_at_every_level(level: Level) -> None:
    stream = io.StringIO()
    configure_logging(level, stream=stream, environ={})
    structlog.get_logger().debug("detail")
    certain_log("hearth").info("ready", batch=8)
    line = json.loads(stream.getvalue().splitlines()[-1])
    assert (line["level"], line["event"], line["batch"]) == ("info", "ready", 8)
    assert stream.getvalue().count("\n") == (2 if level == "debug" else 1)


Entry = dict[str, str]


class FakeJournald:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.socket.bind(str(path))
        self.files = 0

    def read(self) -> list[Entry]:
        entries: list[Entry] = []
        while True:
            try:
                data, handles, _, _ = socket.recv_fds(self.socket, 1 << 20, 1)
            except BlockingIOError:
                return entries
            for handle in handles:
                assert data == b""
                self.files += 1
                data = os.pread(handle, 1 << 20, 0)
                with pytest.raises(PermissionError):
                    os.pwrite(handle, b"x", 0)
                os.close(handle)
            entries.append(parsed(data))


def parsed(data: bytes) -> Entry:
    """An entry by the rules of the protocol; a field that comes twice has both values."""
    found: Entry = {}
    while data:
        line, data = data.split(b"\n", 1)
        name, equals, value = line.partition(b"=")
        if not equals:
            (size,) = struct.unpack("<Q", data[:8])
            value, end, data = data[8 : 8 + size], data[8 + size : 9 + size], data[9 + size :]
            assert end == b"\n"
        before = f"{found[name.decode()]} " if name.decode() in found else ""
        found[name.decode()] = before + value.decode()
    return found


@pytest.fixture
def journald(tmp_path: Path) -> Iterator[FakeJournald]:
    made = FakeJournald(tmp_path / "socket")
    yield made
    made.socket.close()
    factory = structlog.get_config()["logger_factory"]
    structlog.reset_defaults()
    if isinstance(log := factory(), Journal):
        log._socket.close()


@pytest.fixture
def pipe() -> Iterator[tuple[io.FileIO, TextIO]]:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb", buffering=0) as read, os.fdopen(writer, "w") as write:
        yield read, write


def stream_of(stream: TextIO) -> dict[str, str]:
    found = os.fstat(stream.fileno())
    return {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"}


@pytest.fixture
def log(
    journald: FakeJournald, pipe: tuple[io.FileIO, TextIO]
) -> structlog.typing.FilteringBoundLogger:
    environ = stream_of(pipe[1])
    configure_logging("debug", stream=pipe[1], environ=environ, journal=str(journald.path))
    return structlog.get_logger()  # type: ignore[no-any-return] # as the modules use it


def test_an_event_has_its_fields(
    journald: FakeJournald, log: structlog.typing.FilteringBoundLogger
) -> None:
    log.info("request", request="b09922ff-3", reason="length", total_ms=25.998, tokens=[1, 2])
    log.error("the executor was lost", code="executor_failed", field=None)
    request, lost = journald.read()
    assert request == {
        "MESSAGE": "request request=b09922ff-3 reason=length total_ms=25.998 tokens=[1,2]",
        "PRIORITY": "6",
        "SYSLOG_IDENTIFIER": "hearth",
        "REQUEST_ID": "b09922ff-3",
        "HEARTH_LEVEL": "info",
        "HEARTH_EVENT": "request",
        "HEARTH_REASON": "length",
        "HEARTH_TOTAL_MS": "25.998",
        "HEARTH_TOKENS": "[1,2]",
    }
    assert (lost["PRIORITY"], lost["CODE"]) == ("3", "executor_failed")


def test_an_event_of_several_requests_is_found_by_each(
    journald: FakeJournald, log: structlog.typing.FilteringBoundLogger
) -> None:
    log.error("rows failed", requests=["b09922ff-3", "b09922ff-4"])
    (entry,) = journald.read()
    assert entry["REQUEST_ID"] == "b09922ff-3 b09922ff-4"


@pytest.mark.parametrize(("level", "number"), [("debug", "7"), ("warning", "4"), ("critical", "2")])
def test_priorities_are_those_of_syslog(
    journald: FakeJournald, log: structlog.typing.FilteringBoundLogger, level: str, number: str
) -> None:
    getattr(log, level)("x")
    assert journald.read()[0]["PRIORITY"] == number


def test_text_of_a_client_begins_no_field(
    journald: FakeJournald, log: structlog.typing.FilteringBoundLogger
) -> None:
    name = "kiosk\nPRIORITY=0\nREQUEST_ID=x\n\ud800"
    log.info("request", client=name)
    (entry,) = journald.read()
    assert entry["HEARTH_CLIENT"] == name.replace("\ud800", "?")
    assert entry["PRIORITY"] == "6"
    assert "REQUEST_ID" not in entry


def test_text_of_a_client_hides_no_line_from_journalctl(
    journald: FakeJournald, log: structlog.typing.FilteringBoundLogger
) -> None:
    log.info("request", client="a\x1b[2J\x9bb")
    (entry,) = journald.read()
    assert entry["MESSAGE"] == "request client=a\ufffd[2J\ufffdb"
    assert entry["HEARTH_CLIENT"] == "a\x1b[2J\x9bb"


def test_a_traceback_follows_the_line(
    journald: FakeJournald, log: structlog.typing.FilteringBoundLogger
) -> None:
    try:
        int("x")
    except ValueError:
        log.exception("it failed", rid=7)
    (entry,) = journald.read()
    assert entry["MESSAGE"].startswith("it failed rid=7\nTraceback")
    assert entry["PRIORITY"] == "3"


def test_what_is_too_large_for_a_datagram_comes_as_a_sealed_file(
    journald: FakeJournald, log: structlog.typing.FilteringBoundLogger
) -> None:
    log.info("large", text="x" * 400_000)
    log.info("small")
    large, small = journald.read()
    assert large["HEARTH_TEXT"] == "x" * 400_000
    assert small["MESSAGE"] == "small"
    assert journald.files == 1


def test_what_a_busy_journal_does_not_take_is_counted(
    journald: FakeJournald, log: structlog.typing.FilteringBoundLogger
) -> None:
    for number in range(2000):
        log.info("event", number=number)
    heard = journald.read()
    assert [entry["HEARTH_NUMBER"] for entry in heard] == list(map(str, range(len(heard))))
    assert len(heard) < 2000
    log.info("back")
    told, back = journald.read()
    assert (told["PRIORITY"], told["HEARTH_LINES"]) == ("4", str(2000 - len(heard)))
    assert back["MESSAGE"] == "back"


def test_a_journald_that_is_started_anew_is_found_again(
    journald: FakeJournald, log: structlog.typing.FilteringBoundLogger
) -> None:
    journald.socket.close()
    log.info("nobody listens")
    journald.path.unlink()
    again = FakeJournald(journald.path)
    log.info("somebody does")
    assert [entry.get("HEARTH_LINES") for entry in again.read()] == ["1", None]
    again.socket.close()


def test_without_its_socket_the_journal_reads_lines(
    pipe: tuple[io.FileIO, TextIO], tmp_path: Path
) -> None:
    read, write = pipe
    configure_logging(
        "info", stream=write, environ=stream_of(write), journal=str(tmp_path / "none")
    )
    structlog.get_logger().error("x")
    structlog.reset_defaults()
    assert (read.read(4096) or b"").startswith(b'<3>{"timestamp"')


def test_lines_that_are_asked_for_stay_lines(
    journald: FakeJournald, pipe: tuple[io.FileIO, TextIO]
) -> None:
    read, write = pipe
    configure_logging(
        "info", "json", stream=write, environ=stream_of(write), journal=str(journald.path)
    )
    structlog.get_logger().warning("x")
    assert journald.read() == []
    assert (read.read(4096) or b"").startswith(b"<4>{")


def test_a_stream_that_was_led_elsewhere_is_no_journal(
    pipe: tuple[io.FileIO, TextIO], tmp_path: Path
) -> None:
    environ = stream_of(pipe[1])
    assert leads_to_journald(pipe[1], environ)
    with (tmp_path / "file").open("w") as file:
        assert not leads_to_journald(file, environ)
    assert not leads_to_journald(io.StringIO(), environ)
    assert not leads_to_journald(pipe[1], {})
