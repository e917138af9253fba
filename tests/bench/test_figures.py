import json
from pathlib import Path

import pytest

FIGURES = Path(__file__).parents[2] / "docs" / "figures"


@pytest.mark.parametrize("name", ["h200-step", "h200-shared", "h200-ort-spec", "shared"])
def test_figures_of_engines_name_their_type(name: str) -> None:
    found = json.loads((FIGURES / f"{name}.json").read_text("utf-8"))["figures"]
    assert {one.get("dtype") for one in found.values()} <= {"float32", "float16", "bfloat16"}
