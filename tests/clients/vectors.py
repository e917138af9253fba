import json
from pathlib import Path
from typing import Any

CLIENTS = Path(__file__).parents[2] / "clients"


def load(name: str) -> list[dict[str, Any]]:
    """The test vectors of `clients/vectors/<name>.json`."""
    text = (CLIENTS / "vectors" / f"{name}.json").read_text(encoding="utf-8")
    vectors: list[dict[str, Any]] = json.loads(text)
    return vectors
