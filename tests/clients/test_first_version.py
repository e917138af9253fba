"""Clients of 0.1.0 with this daemon: their own tests of it, from the commit of that version."""

import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.vectors import CLIENTS

pytestmark = pytest.mark.slow
ROOT = CLIENTS.parent
COMMIT = "42e319db0549aa97e128b235452cf89252be56a8"
"""The commit that named 0.1.0 in CHANGELOG.md; it bears no tag."""
WITH_A_DAEMON = "client", "async_client", "standstill", "examples"
# Both clients are there at once, as the daemon's messages are the new one's. The rest is what the
# tests name of the daemon's own: its packages, and where it keeps its sessions.
NAMES = (
    (r"\bhearth_client\b", "client_of_010"),
    (r"^from tests\.clients\b", "from tests_of_010.clients"),
    (r"^from daemon\.", "from hearth.daemon."),
    (r"\bdoor\._dispatch\.sessions\b", "door._tracker.sessions"),
)


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """The client of 0.1.0 with its pages and tests, under names of their own."""
    git = shutil.which("git")
    if git is None:
        pytest.skip("git is not installed")
    known = [git, "cat-file", "-e", f"{COMMIT}^{{commit}}"]
    if subprocess.run(known, cwd=ROOT, check=False, capture_output=True).returncode:
        pytest.skip(f"this clone does not go back to 0.1.0, {COMMIT[:8]}")
    command = [git, "archive", COMMIT, "clients", "tests/__init__.py", "tests/clients"]
    packed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(tmp_path, filter="data")
    (tmp_path / "tests").rename(tmp_path / "tests_of_010")
    package = tmp_path / "clients" / "python" / "hearth_client"
    package.rename(package.with_name("client_of_010"))
    for path in [*tmp_path.rglob("*.py"), *tmp_path.rglob("*.md")]:
        text = path.read_text("utf-8")
        for name, now in NAMES:
            text = re.sub(name, now, text, flags=re.MULTILINE)
        path.write_text(text, "utf-8")
    return tmp_path


@pytest.fixture
def temporary() -> Iterator[str]:
    """A folder with a short name, as sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="h1-") as folder:
        yield f"{folder}/t"


def test_their_own_tests_pass(first: Path, temporary: str) -> None:
    files = [f"tests_of_010/clients/test_{name}.py" for name in WITH_A_DAEMON]
    command = [sys.executable, "-m", "pytest", "-q", "-c", str(ROOT / "pyproject.toml")]
    command += ["--rootdir", str(first), "--basetemp", temporary]
    command += ["-p", "tests.conftest", "-p", "no:cacheprovider", *files]
    places = [str(first), str(first / "clients" / "python"), *sys.path]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    told = subprocess.run(
        command, cwd=first, env=environ, check=False, capture_output=True, text=True
    )
    assert told.returncode == 0, told.stdout + told.stderr
