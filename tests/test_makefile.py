import subprocess
from pathlib import Path
from shutil import which

import pytest

MAKE = which("make") or "make"
ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("echo 'shim: python3.10: command not found' >&2; exit 127", "does not run"),
        ("case $2 in *version*) exit 1;; esac", "is too old, 3.10 or newer is needed"),
        ("case $2 in *ensurepip*) exit 1;; esac", "cannot make environments"),
    ],
)
def test_an_interpreter_that_does_not_serve_is_told_apart(
    tmp_path: Path, script: str, told: str
) -> None:
    shim = tmp_path / "python3.10"
    shim.write_text(f"#!/bin/sh\n{script}\n")
    shim.chmod(0o755)
    venv = tmp_path / "venv"
    done = subprocess.run(
        [MAKE, "-C", str(ROOT), f"PYTHON={shim}", f"VENV={venv}", f"{venv}/bin/python"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert f"make: {shim} {told}" in done.stdout
