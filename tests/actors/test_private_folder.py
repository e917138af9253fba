import errno
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hearth.actors.private_folder import private_folder, remove_abandoned

HOLD = """
import sys, time
from pathlib import Path
from hearth.actors.private_folder import private_folder
with private_folder(Path(sys.argv[1])) as folder:
    print(folder, flush=True)
    time.sleep(60)
"""


def age(folder: Path, seconds: float = 3600.0) -> None:
    then = time.time() - seconds
    os.utime(folder, (then, then))


def test_it_is_for_this_user_alone_and_goes_with_all_that_is_in_it(tmp_path: Path) -> None:
    with private_folder(tmp_path) as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "left-over").touch()
    assert not list(tmp_path.iterdir())


def test_it_lies_with_the_temporary_files_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with private_folder() as folder:
        assert folder.parent == tmp_path


def test_what_a_killed_process_left_goes_when_the_next_begins(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process:
        left = Path(process.stdout.readline().decode().strip())
        (left / "socket").touch()
        age(left)
        remove_abandoned(tmp_path)
        assert (left / "socket").exists()
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    age(left)
    with private_folder(tmp_path) as folder:
        assert list(tmp_path.iterdir()) == [folder]


def test_only_old_folders_of_this_kind_and_user_are_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    young, other, file = (tmp_path / name for name in ("hearth.young", "hearth-x", "hearth.file"))
    young.mkdir()
    other.mkdir()
    file.touch()
    (tmp_path / "hearth.link").symlink_to(other)
    for one in (other, file):
        age(one)
    remove_abandoned(tmp_path)
    assert len(list(tmp_path.iterdir())) == 4
    age(young)
    monkeypatch.setattr("os.getuid", lambda: os.geteuid() + 1)
    remove_abandoned(tmp_path)
    assert young.exists()


def test_a_file_system_without_locks_serves_and_keeps_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.EBADF, "no locks here")

    monkeypatch.setattr("fcntl.flock", refuse)
    left = tmp_path / "hearth.left"
    left.mkdir()
    age(left)
    with private_folder(tmp_path) as folder:
        assert folder.is_dir()
    assert left.is_dir()
