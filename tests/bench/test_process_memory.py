import os
import subprocess
import sys
from pathlib import Path

from bench.process_memory import Usage, family_usage


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
