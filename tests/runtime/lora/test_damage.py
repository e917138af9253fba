"""Whatever stands in an adapter's files, it is read as it was or refused in our words."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hearth.runtime.errors import HearthError
from hearth.runtime.lora.stored import read_adapter, store_adapter
from tests.peft_models import write_peft
from tests.runtime.lora.adapter_configs import BASE, adapter_config

ROUNDS = 40
VALUES: tuple[Any, ...] = (None, True, -1, 0, 1e308, "", "x", [], [[]], {}, {"r": {}})


@pytest.mark.parametrize("form", ["peft", "stored"])
def test_changed_bytes(tmp_path: Path, form: str) -> None:
    folder = write_peft(BASE, tmp_path / "peft")
    if form == "stored":
        store_adapter(folder, adapter_config(), folder := tmp_path / "stored")
    random = np.random.default_rng(7)
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        # Headers are where the meaning is.
        reach = min(len(whole), 4000)
        for _ in range(ROUNDS):
            data = bytearray(whole)
            for place in random.integers(0, reach, random.integers(1, 4)):
                data[place] = random.integers(256)
            path.write_bytes(data[: random.integers(len(data))] if random.random() < 0.2 else data)
            read(folder)
        path.write_bytes(whole)
    assert read(folder)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter.json"])
def test_changed_fields(tmp_path: Path, name: str) -> None:
    folder = write_peft(BASE, tmp_path / "peft")
    if name == "adapter.json":
        store_adapter(folder, adapter_config(), folder := tmp_path / "stored")
    fields = json.loads((folder / name).read_text())
    for field in fields:
        for value in VALUES:
            (folder / name).write_text(json.dumps(fields | {field: value}))
            read(folder)


def read(folder: Path) -> bool:
    """Whether the adapter is served."""
    refused = attempt(folder)
    assert refused is None or (refused.code == "adapter_invalid" and refused.field)
    return refused is None


def attempt(folder: Path) -> HearthError | None:
    try:
        read_adapter(folder, adapter_config())
    except HearthError as error:
        return error
    return None
