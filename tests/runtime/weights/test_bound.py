"""Engines that take their weights as inputs, as plans do, here run by ONNX Runtime."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from msgspec import structs
from numpy.typing import NDArray

from hearth.runtime.config import WEIGHTS_FILE, load_config
from hearth.runtime.device.cpu.cpu_device import CpuDevice
from hearth.runtime.engine_folder import MODEL_FILE, record_files, write_config
from hearth.runtime.errors import HearthError
from hearth.runtime.export.options import Dialect
from hearth.runtime.export.weights_export import export_weights
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.options import RuntimeOptions
from hearth.runtime.request import RequestOptions, RowRequest
from hearth.runtime.tensors.tensor import Tensor, TensorMap
from hearth.runtime.weights.external_weight_manager import ExternalWeightManager
from tests.runtime.export.hugging_face import shallow_model
from tests.runtime.export.tensorrt.graphs import export_graph
from tests.runtime.weights.external_models import export, generated, tuned


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
