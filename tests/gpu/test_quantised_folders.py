"""The shipped model with its weights in eight and four bits, by kernels."""

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from hearth.runtime.config import Quantization
from hearth.runtime.export import DraftOptions, export_model
from tests.gpu.conftest import DRAFT, MODEL
from tests.gpu.test_kernel_weights import OPTIONS, spoken

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("kind", "head"), [("int8", "body"), ("int4", "body"), ("int4", "none"), ("none", "int8")]
)
def test_known_answers_of_integers_are_right(tmp_path: Path, kind: Quantization, head: Any) -> None:
    options = structs.replace(OPTIONS, quantization=kind, head_quantization=head)
    export_model(MODEL, tmp_path / "engine", options)
    assert len(spoken(tmp_path / "engine")) == 3 * 40


def test_a_draft_of_integers_opens_beside_its_base(tmp_path: Path) -> None:
    plain = structs.replace(OPTIONS, quantization="int4")
    drafted = structs.replace(plain, draft=DraftOptions(folder=DRAFT))
    for name, options in (("plain", plain), ("drafted", drafted)):
        export_model(MODEL, tmp_path / name, options)
    one, other = (spoken(tmp_path / name) for name in ("plain", "drafted"))
    assert [given[:2] for given in one] == [given[:2] for given in other]
