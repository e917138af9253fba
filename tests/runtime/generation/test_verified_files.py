from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hearth.runtime.config import WEIGHTS_FILE
from hearth.runtime.generation import deployment
from hearth.runtime.options import RuntimeOptions


def test_a_draft_keeps_its_own_weights_where_others_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stored = SimpleNamespace(
        enable_eagle_spec_decode=True, external_weight_files=(WEIGHTS_FILE,), files={}
    )
    skipped: dict[Path, tuple[str, ...]] = {}

    def verify(place: Path, _config: object, *, skip: tuple[str, ...], **_: Any) -> None:
        skipped[place] = skip

    monkeypatch.setattr(deployment, "load_config", lambda _: stored)
    monkeypatch.setattr(deployment, "load_vision_config", lambda _: None)
    monkeypatch.setattr(deployment, "_with_weights", lambda *_: stored)
    monkeypatch.setattr(deployment, "verify_folder", verify)
    deployment.load_engines(Path("engine"), RuntimeOptions(weights="other"))
    assert list(skipped.values()) == [(WEIGHTS_FILE,), ()]
