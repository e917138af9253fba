"""The programs in README.md and in the client's own page pass the types of who uses them."""

import os
import re
from pathlib import Path

import pytest
from mypy import api

from tests.clients.vectors import CLIENTS

PAGES = (CLIENTS.parent / "README.md", CLIENTS / "python" / "README.md")
GIVEN = """
import numpy as np
from numpy.typing import NDArray

camera_array: NDArray[np.uint8] = np.zeros((4, 4, 3), np.uint8)
"""
"""What a sample of README takes as given."""
SETTINGS_OF_A_NODE = """
from hearth_client import Client, GenerateOptions

options: GenerateOptions = {"max_tokens": 5, "temperature": 0.2, "stop": "."}
with Client() as client:
    print(client.generate("x", **options).text())
"""


@pytest.mark.parametrize("version", ["3.10", "3.11"])
def test_the_samples_are_typed(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = [SETTINGS_OF_A_NODE]
    for page in PAGES:
        found = re.findall(
            r"^```python\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL
        )
        samples += [GIVEN * ("camera_array" in one) + one for one in found]
    assert len(samples) == 5
    files = [tmp_path / f"sample_{index}.py" for index in range(len(samples))]
    for file, sample in zip(files, samples, strict=True):
        file.write_text(sample)
    monkeypatch.setenv("MYPYPATH", str(CLIENTS / "python"))
    monkeypatch.chdir(tmp_path)  # Away from the settings of this repository.
    given = ["--strict", "--python-version", version, "--cache-dir", os.devnull]
    told, _, code = api.run([*given, *map(str, files)])
    assert code == 0, told
