from pathlib import Path

import pytest
from click.testing import CliRunner

from hearth.bench.vision.command import vision
from hearth.runtime.errors import HearthError
from tests.bench.running import hide, run
from tests.vision_models import write_vision_model


@pytest.mark.slow
def test_the_command_measures_every_stage_without_a_peer_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (hidden := tmp_path / "hidden").mkdir()
    hide(hidden, "torch", monkeypatch)
    model = write_vision_model(tmp_path / "model", "qwen3_vl")
    code, figures = run("vision", "--model", str(model), "--cache", str(tmp_path), "--quick")
    assert code == 0
    assert set(figures["sizes"]) == {"224x224", "640x480", "1920x1080"}
    for size in figures["sizes"].values():
        assert min(size["decode_ms"], size["engine_ms"], size["prefill_ms"], size["ttft_ms"]) > 0
    assert figures["cached_ms"] > 0
    assert figures["text_row_loss"] < 1
    assert figures["beside"]["text_tokens_per_s"] > 0
    assert figures["hidden"]["images"] == 4
    assert (figures["preprocess_vs_transformers"], figures["ttft_vs_transformers"]) == (None, {})
    assert figures["memory_mb"]["daemon"] > 0
    assert [one.partition(":")[0] for one in figures["notes"]] == ["transformers"]


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    found = CliRunner().invoke(vision, ["--model", str(tmp_path)], standalone_mode=False)
    assert isinstance(found.exception, HearthError)
    assert str(tmp_path) in found.exception.message
