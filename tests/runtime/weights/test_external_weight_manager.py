"""Engines that take their weights as inputs, as plans do, here run by ONNX Runtime."""

import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from msgspec import structs
from numpy.typing import NDArray
from safetensors import safe_open

from hearth.runtime.config import WEIGHTS_FILE, Quantization, load_config
from hearth.runtime.device.cpu.cpu_device import CpuDevice
from hearth.runtime.engine_folder import (
    ANSWER_FILE,
    DATA_FILE,
    DRAFT_FOLDER,
    EMBEDDING_FILE,
    MODEL_FILE,
    record_files,
    write_config,
)
from hearth.runtime.errors import HearthError
from hearth.runtime.export import DraftOptions
from hearth.runtime.export.export import export_weights
from hearth.runtime.export.layout import EMBEDDING, HEAD
from hearth.runtime.export.options import Dialect
from hearth.runtime.generation.answer_check import AnswerReport
from hearth.runtime.generation.deployment import load_engines
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.options import RuntimeOptions, SpeculationOptions
from hearth.runtime.request import GenerationRequest, RequestOptions, RowRequest
from hearth.runtime.tensors.tensor import Tensor, TensorMap
from hearth.runtime.weights.external_weight_manager import ExternalWeightManager, answer_of
from tests.eagle_models import write_draft
from tests.low_rank_models import merge, random_adapter
from tests.peft_models import write_peft
from tests.references import reference_folder
from tests.runtime.export.hugging_face import change_tensors, copy_model, shallow_model
from tests.runtime.export.tensorrt.graphs import export_graph
from tests.runtime.weights.external_models import (
    Given,
    export,
    generated,
    needs_other_weights,
    tuned,
)
from tests.vision_models import write_vision_model


def export_bound(model: Path, target: Path, dialect: Dialect, *, external: bool = True) -> Path:
    """The folder of a plan with its graph, as one that ONNX Runtime runs."""
    export_graph(model, target, dialect, "float32", external_weights=external)
    as_onnx(target)
    return target


def as_onnx(folder: Path) -> None:
    """Let the configuration of a plan's folder be that of an engine of ONNX Runtime."""
    config = load_config(folder)
    taken = {"backend": "onnxruntime", "device": "cpu", "static_decode_batches": ()}
    write_config(folder, structs.replace(config, **taken))


class Made:
    """An engine whose weights are bound, and those of another model."""

    def __init__(self, folder: Path) -> None:
        self.model = shallow_model("qwen3", folder / "model")
        self.other = tuned(self.model, folder / "other")
        self.engine = export_bound(self.model, folder / "engine", "classic")
        self.weights = folder / "other.safetensors"
        config = load_config(self.engine)
        # Weights are written for the graph of the plan.
        write_config(self.engine, structs.replace(config, backend="tensorrt", device="cuda"))
        export_weights(self.other, self.engine, self.weights)
        as_onnx(self.engine)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("bound"))


@pytest.mark.parametrize("name", ["qwen3", "qwen2"])
def test_weights_that_are_bound_give_what_those_in_the_graph_give(
    tmp_path: Path, name: str, dialect: Any
) -> None:
    model = shallow_model(name, tmp_path / "model")
    bound = export_bound(model, tmp_path / "bound", dialect)
    graph = ir.load(bound / MODEL_FILE).graph
    inputs = {str(value.name) for value in graph.inputs}
    assert {"layers.0/qkv", "layers.0/gate_up", "model.norm", "embedding"} <= inputs
    within = export_bound(model, tmp_path / "within", dialect, external=False)
    given = zip(generated(bound), generated(within), strict=True)
    for (row, token, leads), (other_row, other_token, other_leads) in given:
        assert (row, token) == (other_row, other_token)
        # Products with weights that nobody packed beforehand are rounded otherwise.
        np.testing.assert_allclose(leads, other_leads, atol=1e-4)


def test_one_engine_binds_the_weights_of_two_models(tmp_path: Path, made: Made) -> None:
    wanted = generated(export(made.other, tmp_path / "own"))
    given = generated(made.engine, weights=str(made.weights))
    assert [one[:2] for one in given] == [one[:2] for one in wanted]
    assert generated(made.engine) != given


def test_each_is_published_once(made: Made) -> None:
    weights = ExternalWeightManager.open(made.engine, load_config(made.engine))
    assert weights is not None
    weights.load(CpuDevice(), Tensor("embedding", weights.table))
    tensors = TensorMap()
    weights.publish(tensors)
    assert set(tensors) == {spec.name for spec in weights.specs}
    with pytest.raises(HearthError, match="is published twice"):
        weights.publish(tensors)


def test_an_engine_with_a_binding_that_no_file_has_is_refused(tmp_path: Path, made: Made) -> None:
    for change, wanted in (("other", "layers.0/renamed"), ("more", "layers.0/spare")):
        engine = export_bound(made.model, tmp_path / change, "classic")
        model = ir.load(engine / MODEL_FILE)
        bound = next(value for value in model.graph.inputs if value.name == "layers.0/qkv")
        if change == "other":
            bound.name = wanted
        else:
            spare = ir.Value(name=wanted, shape=bound.shape, type=bound.type)
            model.graph.inputs.append(spare)
        ir.save(model, engine / MODEL_FILE)
        write_config(engine, structs.replace(load_config(engine), files=record_files(engine)))
        with pytest.raises(HearthError) as caught:
            generated(engine)
        assert (caught.value.code, caught.value.field) == ("engine_incompatible", wanted)


class HeadOf:
    """A runtime whose head is set, and what one prompt gives in it."""

    def __init__(self, folder: Path) -> None:
        self.runtime = LLMInferenceRuntime.open(folder, RuntimeOptions(threads=1))
        self.runtime.capture([1])
        self.runner = self.runtime._runner
        weights = self.runner._resources.external_weights
        assert weights is not None
        self.name = weights.head
        self.array = np.array(weights.table if self.name == "embedding" else None)

    def tops(self) -> list[float]:
        options = RequestOptions(max_tokens=4, ignore_eos=True, logprobs=4)
        self.runtime.admit([RowRequest(token_ids=[1, 2, 3], prompt_length=3, options=options)])
        given: list[float] = []
        while self.runtime.active:
            for token in self.runtime.step().tokens:
                given += [top.logprob for top in token.top]
        return given

    @property
    def graphs(self) -> tuple[int, int]:
        """Steps launched from a captured graph, and others."""
        counters = self.runner.executor.counters
        return counters.hits, counters.misses

    def set(self, array: NDArray[Any]) -> None:
        self.runner.set_lm_head_weights(self.name, Tensor(self.name, array))


@pytest.mark.parametrize("kind", ["bound", "outside"])
def test_other_numbers_give_the_logits_and_the_first_ones_again(
    tmp_path: Path, made: Made, kind: str
) -> None:
    engine = made.engine if kind == "bound" else export(made.model, tmp_path / "engine")
    head = HeadOf(engine)
    try:
        first = head.tops()
        # No token is likelier than another: the table that embeds tokens is the same as before.
        head.set(np.zeros_like(head.array))
        vocabulary = len(head.array)
        np.testing.assert_allclose(head.tops(), -np.log(vocabulary), rtol=1e-5)
        head.set(head.array)
        assert head.tops() == first
        for wrong in (head.array.astype(np.float16), head.array[1:]):
            with pytest.raises(HearthError) as caught:
                head.set(wrong)
            assert (caught.value.code, caught.value.field) == ("invalid_value", head.name)
        with pytest.raises(HearthError) as caught:
            head.runner.set_lm_head_weights("head", Tensor("head", head.array))
        assert (caught.value.code, caught.value.field) == ("invalid_value", "head")
        assert head.tops() == first
    finally:
        head.runtime.close()


@pytest.mark.parametrize("kind", ["bound", "outside"])
def test_steps_are_launched_from_graphs_with_another_head_too(
    tmp_path: Path, made: Made, kind: str
) -> None:
    engine = made.engine if kind == "bound" else export(made.model, tmp_path / "engine")
    head, taken = HeadOf(engine), []
    try:
        for array in (None, np.zeros_like(head.array), head.array.copy()):
            if array is not None:
                head.set(array)
            hits, misses = head.graphs
            head.tops()
            taken.append((head.graphs[0] - hits, head.graphs[1] - misses))
    finally:
        head.runtime.close()
    assert taken[0][0] > 0
    assert taken == [taken[0]] * 3


def test_a_head_is_set_before_the_steps_of_a_gpu_are_captured(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = HeadOf(made.engine)
    try:
        first = head.tops()
        monkeypatch.setattr(head.runner._device, "kind", "cuda")
        with pytest.raises(HearthError, match="captured") as caught:
            head.set(np.zeros_like(head.array))
        assert (caught.value.code, caught.value.field) == ("unsupported_option", head.name)
        monkeypatch.undo()
        assert head.tops() == first
    finally:
        head.runtime.close()


def test_a_head_that_nobody_can_set_is_refused(tmp_path: Path, made: Made) -> None:
    for options in ({"quantization": "int4"}, {"external_weights": False}):
        engine = export(made.model, tmp_path / "-".join(options), **options)
        runtime = LLMInferenceRuntime.open(engine, RuntimeOptions(threads=1))
        tensor = Tensor("head", np.zeros((32, 288), np.float32))
        try:
            with pytest.raises(HearthError) as caught:
                runtime._runner.set_lm_head_weights("head", tensor)
        finally:
            runtime.close()
        assert (caught.value.code, caught.value.field) == ("unsupported_option", "head")


def test_the_file_of_a_plan_is_that_of_any_engine(made: Made) -> None:
    assert (made.engine / WEIGHTS_FILE).stat().st_size == made.weights.stat().st_size


class FineTune:
    """An engine of one model, and the weights of another for it."""

    def __init__(self, folder: Path) -> None:
        self.model = shallow_model("qwen3", folder / "model")
        self.other = tuned(self.model, folder / "other")
        self.engine = export(self.model, folder / "engine")
        self.weights = folder / "other.safetensors"
        export_weights(self.other, self.engine, self.weights)


@pytest.fixture(scope="module")
def tuned_pair(tmp_path_factory: pytest.TempPathFactory) -> FineTune:
    return FineTune(tmp_path_factory.mktemp("fine_tunes"))


def checked(made: FineTune, answer_of_weights: str, weights: str = "") -> AnswerReport:
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
    tmp_path: Path, tuned_pair: FineTune, quantization: Quantization
) -> None:
    engine = export(tuned_pair.model, tmp_path / "engine", quantization=quantization)
    weights = tmp_path / "weights.safetensors"
    export_weights(tuned_pair.other, engine, weights)
    for model, given in ((tuned_pair.model, ""), (tuned_pair.other, str(weights))):
        own = tmp_path / f"own-{model.name}"
        export(model, own, external_weights=False, quantization=quantization)
        assert generated(engine, weights=given) == generated(own)
    assert generated(engine) != generated(engine, weights=str(weights))


@needs_other_weights
def test_each_file_knows_what_has_to_be_answered_with_it(tuned_pair: FineTune) -> None:
    given = str(tuned_pair.weights)
    assert checked(tuned_pair, given, weights=given).compared > 0
    assert checked(tuned_pair, "").compared > 0
    for asked, served in ((given, ""), ("", given)):
        with pytest.raises(HearthError) as caught:
            checked(tuned_pair, asked, weights=served)
        assert caught.value.code == "wrong_answer"


def test_what_is_told_by_its_files_is_another_with_other_weights(
    tuned_pair: FineTune,
) -> None:
    configs = [
        load_engines(tuned_pair.engine, RuntimeOptions(weights=one)).base
        for one in ("", str(tuned_pair.weights))
    ]
    assert [one.model_name for one in configs] == ["model", "other"]
    own, other = (one.files for one in configs)
    assert own.keys() == other.keys()
    assert {name for name in own if own[name] != other[name]} == {WEIGHTS_FILE}


@needs_other_weights
def test_the_engines_own_file_may_be_given_too(tmp_path: Path, tuned_pair: FineTune) -> None:
    copy = Path(shutil.copy(tuned_pair.engine / WEIGHTS_FILE, tmp_path))
    assert generated(tuned_pair.engine, weights=str(copy)) == generated(tuned_pair.engine)


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


def test_a_window_that_would_hide_something_is_refused(
    tuned_pair: FineTune, tmp_path: Path
) -> None:
    shutil.copytree(tuned_pair.other, other := tmp_path / "other")
    path = other / "config.json"
    window = {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 0}
    path.write_text(json.dumps(json.loads(path.read_text()) | window))
    error = refusal(tuned_pair, other, tmp_path / "weights")
    assert (error.code, error.field) == ("model_unsupported", "sliding_window")


def test_a_head_stored_beside_a_tied_table_is_no_other_weights(
    tuned_pair: FineTune, tmp_path: Path
) -> None:
    shutil.copytree(tuned_pair.other, other := tmp_path / "other")
    change_tensors(other, lambda one: one.update({HEAD: one[EMBEDDING] * 2}))
    error = refusal(tuned_pair, other, tmp_path / "weights")
    assert (error.code, error.field) == ("model_unsupported", "tied_head")


def refusal(made: FineTune, model: Path, target: Path) -> HearthError:
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
    tmp_path: Path, tuned_pair: FineTune, field: str, value: object
) -> None:
    model = copy_model("qwen3", tmp_path / "model", **{"num_hidden_layers": 1, field: value})
    (model / "generation_config.json").unlink()
    given = refusal(tuned_pair, model, tmp_path / "weights")
    known = {
        "rope_parameters": "rope",
        "num_hidden_layers": "num_layers",
        "tie_word_embeddings": "tied_head",
    }
    assert (given.code, given.field) == ("model_unsupported", known.get(field, field))


def test_a_model_of_another_tokenizer_is_refused(tmp_path: Path, tuned_pair: FineTune) -> None:
    model = tuned(tuned_pair.model, tmp_path / "model")
    path = model / "tokenizer.json"
    path.write_text(path.read_text() + "\n")
    export_weights(model, tuned_pair.engine, tmp_path / "same")
    swapped = path.read_text().replace('"a":67,"b":68', '"b":67,"a":68')
    assert swapped != path.read_text()
    path.write_text(swapped)
    given = refusal(tuned_pair, model, tmp_path / "weights")
    assert (given.code, given.field) == ("tokenizer_mismatch", "tokenizer.json")


def test_an_engine_with_weights_of_its_own_takes_none(tmp_path: Path, tuned_pair: FineTune) -> None:
    engine = export(tuned_pair.model, tmp_path / "engine", external_weights=False)
    with pytest.raises(HearthError) as caught:
        export_weights(tuned_pair.other, engine, tmp_path / "weights")
    assert (caught.value.code, caught.value.field) == ("unsupported_option", "engine")
    with pytest.raises(HearthError) as caught:
        generated(engine, weights=str(tuned_pair.weights))
    assert (caught.value.code, caught.value.field) == ("unsupported_option", "weights")


def test_a_file_that_is_there_is_not_written_over(tuned_pair: FineTune) -> None:
    given = refusal(tuned_pair, tuned_pair.other, tuned_pair.weights)
    assert (given.code, given.field) == ("invalid_value", "target")


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


PROMPT = [3, 14, 15, 92, 6, 5, 35]


def test_an_adapter_is_added_to_external_weights(tmp_path: Path, dialect: str) -> None:
    base = reference_folder("qwen3")
    write_peft(base, tmp_path / "adapter", rank=8)
    merge(base, tmp_path / "merged", random_adapter(base, 8))
    engine = export(base, tmp_path / "engine", dialect=dialect, max_lora_rank=8)
    plain = export(tmp_path / "merged", tmp_path / "other", dialect=dialect)
    tokens, logprobs = _answer(engine, tmp_path / "adapter")
    wanted, expected = _answer(plain)
    assert tokens == wanted != _answer(engine)[0]
    assert np.allclose(logprobs, expected, atol=1e-4)


def _answer(folder: Path, adapter: Path | None = None) -> tuple[list[int], Any]:
    with closing(LLMInferenceRuntime.open(folder, RuntimeOptions(threads=1))) as runtime:
        if adapter is not None:
            runtime.load_adapter("own", adapter)
        name = "" if adapter is None else "own"
        options = RequestOptions(max_tokens=12, ignore_eos=True, adapter=name, logprobs=0)
        row = RowRequest(token_ids=PROMPT, prompt_length=len(PROMPT), options=options)
        response = runtime.handle_request(GenerationRequest(rows=[row])).rows[0]
        return response.token_ids, response.logprobs
