import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from hearth.bench.child_process import ChildProcess, Usage, family_usage
from hearth.runtime.errors import HearthError

ROOT = str(Path(__file__).parents[2])


@contextmanager
def talker(folder: Path, words: str, then: str) -> Iterator[ChildProcess]:
    job, environ = [words, then], {"PYTHONPATH": ROOT}
    with closing(ChildProcess("tests.bench.talker", job, folder / "log", environ)) as process:
        yield process


def test_lines_go_both_ways_and_may_come_in_one_piece(tmp_path: Path) -> None:
    with talker(tmp_path, "1\n2\n", "echo") as process:
        assert [process.receive(int, 20), process.receive(int, 20)] == [1, 2]
        process.send([1, 2])
        assert process.receive(list[int], 20) == [1, 2]


def test_silence_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hearth.bench.child_process._CLOSE_TIMEOUT_S", 0.1)
    silence = pytest.raises(HearthError, match=r"has said nothing for 0\.3 s")
    with talker(tmp_path, "half a line", "hang") as process, silence:
        process.receive(str, 0.3)


def test_the_end_of_the_process_is_told_with_its_log(tmp_path: Path) -> None:
    with talker(tmp_path, "", "end") as process:
        with pytest.raises(HearthError, match=rf"has ended: .* \(see {tmp_path}/log\)"):
            process.receive(str, 20)
        with pytest.raises(HearthError, match="has ended"):
            send_for_ever(process)


def test_what_the_process_said_last_is_told(tmp_path: Path) -> None:
    process = ChildProcess("no.such.module", 1, tmp_path / "log")
    words = r"has ended: .*No module named 'no'"
    with closing(process), pytest.raises(HearthError, match=words):
        process.receive(str, 20)


def send_for_ever(process: ChildProcess) -> None:
    # The first line may still fit into the pipe of a process that has just ended.
    while True:
        process.send({})


PROGRAM = """
import os
from hearth.bench.child_process import ParentProcess
from hearth.runtime.errors import HearthError
parent = ParentProcess()
print("noise", flush=True)
os.write(1, b"more noise")
parent.send(parent.job(list[int]))
while (told := parent.receive(int)) is not None:
    parent.send(told + 1)
parent.refuse(HearthError("engine_missing", "not here", "engine"))
"""
REFUSED = b'{"type":"Refused","code":"engine_missing","message":"not here","field":"engine"}\n'


def test_a_child_answers_until_it_is_told_no_more_and_what_is_printed_stays_apart() -> None:
    command = [sys.executable, "-c", PROGRAM, "[7]"]
    done = subprocess.run(command, input=b"1\n2\n", capture_output=True, check=True)
    assert done.stdout == b"[7]\n2\n3\n" + REFUSED
    assert done.stderr == b"noise\nmore noise"


def test_a_refusal_is_raised_where_the_child_was_started(tmp_path: Path) -> None:
    with talker(tmp_path, REFUSED.decode(), "end") as process:
        with pytest.raises(HearthError, match="not here") as caught:
            process.receive(int, 20)
        assert (caught.value.code, caught.value.field) == ("engine_missing", "engine")


def write_process(proc: Path, pid: int, children: str, rss_kb: int | None, handles: int) -> None:
    folder = proc / str(pid)
    (folder / "task" / str(pid)).mkdir(parents=True)
    (folder / "task" / str(pid) / "children").write_text(children)
    (folder / "fd").mkdir()
    for index in range(handles):
        (folder / "fd" / str(index)).touch()
    line = "" if rss_kb is None else f"VmRSS:\t{rss_kb} kB\n"
    (folder / "status").write_text(f"Name:\tx\n{line}Threads:\t1\n")


def test_children_of_children_count(tmp_path: Path) -> None:
    write_process(tmp_path, 1, "2 3 ", 100, 4)
    write_process(tmp_path, 2, "4 ", 10, 2)
    write_process(tmp_path, 3, "", None, 1)
    write_process(tmp_path, 4, "", 1, 0)
    assert family_usage(1, tmp_path) == Usage(111 * 1024, 7)


def test_a_child_that_has_just_ended_counts_nothing(tmp_path: Path) -> None:
    write_process(tmp_path, 1, "2 ", 100, 4)
    assert family_usage(1, tmp_path) == Usage(100 * 1024, 4)


def test_a_thread_that_has_just_ended_has_no_children(tmp_path: Path) -> None:
    write_process(tmp_path, 1, "", 100, 4)
    # Listed, and unreadable by the time that it is read.
    (tmp_path / "1" / "task" / "2" / "children").mkdir(parents=True)
    assert family_usage(1, tmp_path) == Usage(100 * 1024, 4)


def test_a_real_child_is_found() -> None:
    alone = family_usage(os.getpid())
    command = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        together = family_usage(os.getpid())
        child.communicate(b"\n")
    assert together.rss_bytes > alone.rss_bytes + (1 << 20)
    assert together.handles > alone.handles
