from pathlib import Path

import pytest

from hearth.bench.vision.session import SIZES, photograph
from hearth.bench.vision.worker import PictureJob
from hearth.runtime.errors import HearthError
from tests.vision_models import write_vision_model

pytestmark = pytest.mark.reference
pytest.importorskip("torch")
pictures = pytest.importorskip("hearth.bench.vision.transformers_pictures")


def test_the_peer_answers_about_what_it_sees(tmp_path: Path) -> None:
    model = write_vision_model(tmp_path / "model", "qwen3_vl", "saved")
    peer = pictures.TransformersPictures(PictureJob(contender="transformers", path=str(model)))
    assert peer.works[:2] == ["first_token", "patches"]
    files = [photograph(SIZES[0], seed) for seed in range(6)]
    tokens = [peer.do("first_token", data, "what is it?") for data in files]
    assert tokens == [peer.do("first_token", data, "what is it?") for data in files]
    assert len(set(tokens)) > 1
    assert peer.do("patches", files[0], "") == 0


def test_a_family_with_other_prompts_is_refused(tmp_path: Path) -> None:
    model = write_vision_model(tmp_path / "model", "idefics3")
    with pytest.raises(HearthError, match="qwen3_vl"):
        pictures.TransformersPictures(PictureJob(contender="transformers", path=str(model)))
