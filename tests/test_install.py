"""What docs/install.md says of the extras: each cell of its table is asked of the package index."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from uv import find_uv_bin

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
# Found once: its search is not safe in threads.
UV = find_uv_bin()
PYTHONS = ("3.10", "3.11", "3.12")
FOR_WORK_ON_HEARTH = {"bench", "dev", "reference"}
STUBS = re.compile(r"^tensorrt((-lean|-rtx)?(-cu\d+)?|-cu\d+-libs)==")
NO_INDEX = re.compile("Failed to fetch|error sending request|Network connectivity is disabled")
PATIENCE = {"UV_HTTP_TIMEOUT": "15", "UV_HTTP_RETRIES": "1"}
pytestmark = pytest.mark.timeout(300)  # all cells are asked for the first one


class Cell(NamedTuple):
    """An extra on a platform under a Python, and what the page says of it."""

    extra: str
    platform: str
    python: str
    said: str


class Answer(NamedTuple):
    resolves: bool
    text: str


def project(manifest: Path) -> Any:
    return tomllib.loads(manifest.read_text())["project"]


PROJECT = project(ROOT / "pyproject.toml")
CLIENT = project(ROOT / "clients" / "python" / "pyproject.toml")


def cells() -> list[Cell]:
    page = (ROOT / "docs" / "install.md").read_text().split("## What resolves")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    return [
        Cell(row[0].strip("`"), row[1].strip("`"), python, said)
        for row in rows
        for python, said in zip(PYTHONS, row[2:], strict=True)
    ]


def requirements(extra: str) -> str:
    own = [line for line in PROJECT["dependencies"] if not line.startswith("hearth-client")]
    lines = [*own, *CLIENT["dependencies"], *PROJECT["optional-dependencies"][extra]]
    return "\n".join(lines)


def resolve(cell: Cell) -> Answer:
    platform = ["--python-platform", cell.platform, "--python-version", cell.python]
    quiet = ["--no-config", "--no-python-downloads", "--no-header", "--no-annotate"]
    done = subprocess.run(
        [UV, "pip", "compile", *quiet, "--only-binary", ":all:", *platform, "-"],
        input=requirements(cell.extra),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **PATIENCE},
    )
    return Answer(done.returncode == 0, done.stdout or done.stderr)


@pytest.fixture(scope="module")
def answers() -> dict[Cell, Answer]:
    with ThreadPoolExecutor(4) as threads:
        return dict(zip(cells(), threads.map(resolve, cells()), strict=True))


@pytest.mark.parametrize("extra", ["cpu", "cuda12", "cuda13", "tensorrt", "tensorrt-lean"])
def test_each_engine_comes_with_what_holds_replies_to_a_form(extra: str) -> None:
    extras = PROJECT["optional-dependencies"]
    assert set(extras["grammar"]) <= set(extras[extra])


@pytest.mark.parametrize("cell", cells(), ids=lambda cell: "-".join(cell[:3]))
def test_the_table_says_what_resolves(cell: Cell, answers: dict[Cell, Answer]) -> None:
    answer = answers[cell]
    if not answer.resolves and NO_INDEX.search(answer.text):
        pytest.skip("the package index cannot be reached")
    assert answer.resolves == (cell.said == "resolves"), answer.text
    if not answer.resolves:
        assert cell.said.split("`")[1] in answer.text
    assert not [line for line in answer.text.splitlines() if STUBS.match(line)]


def test_the_table_has_every_extra_on_both_platforms() -> None:
    extras = PROJECT["optional-dependencies"].keys() - FOR_WORK_ON_HEARTH
    kinds = {(extra, kind) for extra in extras for kind in ("x86_64", "aarch64")}
    assert {(cell.extra, cell.platform.partition("-")[0]) for cell in cells()} == kinds


def test_no_extra_names_a_package_that_fetches_its_content_elsewhere() -> None:
    named = [line for extra in PROJECT["optional-dependencies"].values() for line in extra]
    stubs = {"tensorrt", "tensorrt-cu12", "tensorrt-cu13", "tensorrt-lean", "tensorrt-rtx"}
    assert not stubs & {re.split("[^a-z0-9-]", line)[0] for line in named}


def test_no_engine_library_is_installed_unasked() -> None:
    assert not [line for line in PROJECT["dependencies"] if "onnxruntime" in line]
