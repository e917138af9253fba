import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from hearth.runtime.config import WEIGHTS_FILE, Quantization, load_config
from hearth.runtime.engine_folder import ANSWER_FILE, DATA_FILE, EMBEDDING_FILE
from tests.runtime.export.hugging_face import shallow_model
from tests.runtime.weights.external_models import export, generated, needs_other_weights


@needs_other_weights
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("name", ["qwen3", "qwen2"])
def test_weights_outside_give_what_those_inside_give_bit_for_bit(
    tmp_path: Path, name: str, quantization: Quantization, dialect: Any
) -> None:
    model = shallow_model(name, tmp_path / "model")
    kinds = {"quantization": quantization, "dialect": dialect}
    inside = export(model, tmp_path / "inside", external_weights=False, **kinds)
    outside = export(model, tmp_path / "outside", **kinds)
    wanted = generated(inside)
    assert generated(outside) == wanted
    moved = Path(shutil.move(outside / WEIGHTS_FILE, tmp_path / "elsewhere.safetensors"))
    assert generated(outside, weights=str(moved)) == wanted


def test_the_folder_holds_one_file_of_weights_that_others_can_read(tmp_path: Path) -> None:
    model = shallow_model("qwen3", tmp_path / "model")
    engine = export(model, tmp_path / "engine", dialect="native")
    config = load_config(engine)
    assert config.external_weight_files == (WEIGHTS_FILE,)
    assert not {DATA_FILE, EMBEDDING_FILE} & set(config.files)
    with safe_open(engine / WEIGHTS_FILE, "numpy") as file:
        assert "embedding" in file.keys()  # noqa: SIM118 - no mapping
        assert file.get_tensor("embedding").shape == (config.vocab_size, config.hidden_size)
        assert file.metadata()["answer"] == (engine / ANSWER_FILE).read_text()
    # Neither norms nor biases stand in the graph.
    assert config.files["model.onnx"].bytes < 2 * 4096 * config.num_decoder_layers
