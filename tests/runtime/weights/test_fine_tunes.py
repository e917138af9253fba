"""One engine, and the weights of two models."""

import json
import shutil
from pathlib import Path

import pytest

from hearth.runtime.config import WEIGHTS_FILE, Quantization, load_config
from hearth.runtime.engine_folder import DRAFT_FOLDER
from hearth.runtime.errors import HearthError
from hearth.runtime.export import DraftOptions
from hearth.runtime.export.layout import EMBEDDING, HEAD
from hearth.runtime.export.weights_export import export_weights
from hearth.runtime.generation.answer_check import AnswerReport
from hearth.runtime.generation.deployment import load_engines
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.options import RuntimeOptions, SpeculationOptions
from hearth.runtime.weights.external_weight_manager import answer_of
from tests.eagle_models import write_draft
from tests.references import reference_folder
from tests.runtime.export.hugging_face import change_tensors, copy_model, shallow_model
from tests.runtime.weights.external_models import (
    Given,
    export,
    generated,
    needs_other_weights,
    tuned,
)
from tests.vision_models import write_vision_model


class Made:
    """An engine of one model, and the weights of another for it."""

    def __init__(self, folder: Path) -> None:
        self.model = shallow_model("qwen3", folder / "model")
        self.other = tuned(self.model, folder / "other")
        self.engine = export(self.model, folder / "engine")
        self.weights = folder / "other.safetensors"
        export_weights(self.other, self.engine, self.weights)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("fine_tunes"))


def checked(made: Made, answer_of_weights: str, weights: str = "") -> AnswerReport:
    options = RuntimeOptions(threads=1, weights=weights)
    runtime = LLMInferenceRuntime.open(made.engine, options)
    try:
        answer = answer_of(made.engine, runtime.config, answer_of_weights)
        assert answer is not None
        return runtime.check_answer(answer)
    finally:
        runtime.close()


@needs_other_weights
@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_one_engine_serves_both_as_their_own_engines_would(
    tmp_path: Path, made: Made, quantization: Quantization
) -> None:
    engine = export(made.model, tmp_path / "engine", quantization=quantization)
    weights = tmp_path / "weights.safetensors"
    export_weights(made.other, engine, weights)
    for model, given in ((made.model, ""), (made.other, str(weights))):
        own = tmp_path / f"own-{model.name}"
        export(model, own, external_weights=False, quantization=quantization)
        assert generated(engine, weights=given) == generated(own)
    assert generated(engine) != generated(engine, weights=str(weights))


@needs_other_weights
def test_each_file_knows_what_has_to_be_answered_with_it(made: Made) -> None:
    given = str(made.weights)
    assert checked(made, given, weights=given).compared > 0
    assert checked(made, "").compared > 0
    for asked, served in ((given, ""), ("", given)):
        with pytest.raises(HearthError) as caught:
            checked(made, asked, weights=served)
        assert caught.value.code == "wrong_answer"


def test_what_is_told_by_its_files_is_another_with_other_weights(made: Made) -> None:
    configs = [
        load_engines(made.engine, RuntimeOptions(weights=one)).base
        for one in ("", str(made.weights))
    ]
    assert [one.model_name for one in configs] == ["model", "other"]
    own, other = (one.files for one in configs)
    assert own.keys() == other.keys()
    assert {name for name in own if own[name] != other[name]} == {WEIGHTS_FILE}


@needs_other_weights
def test_the_engines_own_file_may_be_given_too(tmp_path: Path, made: Made) -> None:
    copy = Path(shutil.copy(made.engine / WEIGHTS_FILE, tmp_path))
    assert generated(made.engine, weights=str(copy)) == generated(made.engine)


@needs_other_weights
def test_a_base_with_a_draft_and_adapters_takes_other_weights(tmp_path: Path) -> None:
    model = reference_folder("qwen3")
    other = tuned(model, tmp_path / "other")
    folder = write_draft(model, tmp_path / "draft")
    draft = DraftOptions(folder=folder, max_verify_tree_size=4, max_draft_tree_size=4)
    engine = export(model, tmp_path / "engine", draft=draft, max_lora_rank=4)
    assert load_config(engine / DRAFT_FOLDER).external_weight_files == ()
    weights = tmp_path / "weights.safetensors"
    export_weights(other, engine, weights)
    drafted = SpeculationOptions(method="eagle", adaptive=False)
    given = generated(engine, weights=str(weights), speculation=drafted)
    wanted = generated(export(other, tmp_path / "own", external_weights=False))
    # What is proposed by a draft of another model is verified by this one.
    assert by_row(given) == by_row(wanted)


def by_row(given: Given) -> list[list[int]]:
    return [[token for row, token, _ in given if row == number] for number in range(3)]


@needs_other_weights
def test_the_text_of_a_model_that_takes_images_takes_other_weights(tmp_path: Path) -> None:
    model = write_vision_model(tmp_path / "model", "qwen3_vl")
    other = tuned(model, tmp_path / "other")
    engine, weights = export(model, tmp_path / "engine"), tmp_path / "weights"
    export_weights(other, engine, weights)
    own = export(other, tmp_path / "own", external_weights=False)
    assert generated(engine, weights=str(weights)) == generated(own)


@needs_other_weights
def test_a_table_of_16_bits_is_one_of_all_weights_of_the_engine(tmp_path: Path) -> None:
    model = shallow_model("llama", tmp_path / "model")
    other = tuned(model, tmp_path / "other")
    engine, weights = export(model, tmp_path / "engine", quantization="int8"), tmp_path / "weights"
    assert load_config(engine).embedding_dtype == "float16"
    export_weights(other, engine, weights)
    own = export(other, tmp_path / "own", external_weights=False, quantization="int8")
    assert generated(engine, weights=str(weights)) == generated(own)
    change_tensors(other, lambda one: one.update({EMBEDDING: one[EMBEDDING] * 1e9}))
    with pytest.raises(HearthError, match="not finite in float16") as caught:
        export_weights(other, engine, tmp_path / "beyond")
    assert (caught.value.code, caught.value.field) == ("model_invalid", EMBEDDING)


def test_a_window_that_would_hide_something_is_refused(made: Made, tmp_path: Path) -> None:
    shutil.copytree(made.other, other := tmp_path / "other")
    path = other / "config.json"
    window = {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 0}
    path.write_text(json.dumps(json.loads(path.read_text()) | window))
    error = refusal(made, other, tmp_path / "weights")
    assert (error.code, error.field) == ("model_unsupported", "sliding_window")


def test_a_head_stored_beside_a_tied_table_is_no_other_weights(made: Made, tmp_path: Path) -> None:
    shutil.copytree(made.other, other := tmp_path / "other")
    change_tensors(other, lambda one: one.update({HEAD: one[EMBEDDING] * 2}))
    error = refusal(made, other, tmp_path / "weights")
    assert (error.code, error.field) == ("model_unsupported", "tied_head")


def refusal(made: Made, model: Path, target: Path) -> HearthError:
    before = set(target.parent.iterdir())
    with pytest.raises(HearthError) as caught:
        export_weights(model, made.engine, target)
    assert set(target.parent.iterdir()) == before
    return caught.value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rms_norm_eps", 1e-3),
        ("rope_parameters", {"rope_theta": 5.0, "rope_type": "default"}),
        ("num_hidden_layers", 2),
        ("tie_word_embeddings", False),
        ("eos_token_id", 7),
    ],
)
def test_a_model_of_another_kind_is_refused_by_its_field(
    tmp_path: Path, made: Made, field: str, value: object
) -> None:
    model = copy_model("qwen3", tmp_path / "model", **{"num_hidden_layers": 1, field: value})
    (model / "generation_config.json").unlink()
    given = refusal(made, model, tmp_path / "weights")
    known = {
        "rope_parameters": "rope",
        "num_hidden_layers": "num_layers",
        "tie_word_embeddings": "tied_head",
    }
    assert (given.code, given.field) == ("model_unsupported", known.get(field, field))


def test_a_model_of_another_tokenizer_is_refused(tmp_path: Path, made: Made) -> None:
    model = tuned(made.model, tmp_path / "model")
    path = model / "tokenizer.json"
    path.write_text(path.read_text() + "\n")
    export_weights(model, made.engine, tmp_path / "same")
    swapped = path.read_text().replace('"a":67,"b":68', '"b":67,"a":68')
    assert swapped != path.read_text()
    path.write_text(swapped)
    given = refusal(made, model, tmp_path / "weights")
    assert (given.code, given.field) == ("tokenizer_mismatch", "tokenizer.json")


def test_an_engine_with_weights_of_its_own_takes_none(tmp_path: Path, made: Made) -> None:
    engine = export(made.model, tmp_path / "engine", external_weights=False)
    with pytest.raises(HearthError) as caught:
        export_weights(made.other, engine, tmp_path / "weights")
    assert (caught.value.code, caught.value.field) == ("unsupported_option", "engine")
    with pytest.raises(HearthError) as caught:
        generated(engine, weights=str(made.weights))
    assert (caught.value.code, caught.value.field) == ("unsupported_option", "weights")


def test_a_file_that_is_there_is_not_written_over(made: Made) -> None:
    given = refusal(made, made.other, made.weights)
    assert (given.code, given.field) == ("invalid_value", "target")
