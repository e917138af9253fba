import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from hearth.daemon.cli import serve as open_files
from hearth.runtime.errors import HearthError

Limits = tuple[int, int]


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[Limits]:
    """The limits of this process, the newest last; nothing is really changed."""
    held = [(1024, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: held[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _kind, new: held.append(new))
    return held


def test_the_limit_is_raised_to_what_the_system_allows(limits: list[Limits]) -> None:
    open_files.make_room(64)
    assert limits[-1] == (4096, 4096)


@pytest.mark.usefixtures("limits")
def test_clients_that_do_not_fit_are_refused() -> None:
    with pytest.raises(HearthError, match="4096 clients need 4224 open files") as refused:
        open_files.make_room(4096)
    assert (refused.value.code, refused.value.field) == ("invalid_value", "clients")


def test_where_the_limit_cannot_be_raised_it_stands(
    limits: list[Limits], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_kind: int, _new: Limits) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "setrlimit", refuse)
    open_files.make_room(64)
    with pytest.raises(HearthError, match="the system allows 1024"):
        open_files.make_room(1000)
    assert limits == [(1024, 4096)]


def test_a_system_without_a_limit_takes_all(limits: list[Limits]) -> None:
    limits.append((1024, resource.RLIM_INFINITY))
    open_files.make_room(4096)
    assert limits[-1] == (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


def test_files_that_the_caller_closed_are_no_place_for_others(tmp_path: Path) -> None:
    code = (
        "import os, sys; from hearth.daemon.cli.serve import fill_standard_files as fill; fill(); "
        "sys.stderr.write('nowhere'); sys.stderr.flush(); "
        "open(sys.argv[1], 'w').write(os.readlink('/proc/self/fd/0') * (os.pipe()[0] > 2))"
    )
    told = tmp_path / "told"
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]
    ended = subprocess.run([*closed, sys.executable, "-c", code, str(told)], check=False)
    assert (ended.returncode, told.read_text()) == (0, os.devnull)
