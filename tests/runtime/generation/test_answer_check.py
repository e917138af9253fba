import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from msgspec import structs
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from hearth.runtime.config import load_config
from hearth.runtime.engine_folder import DATA_FILE, MODEL_FILE, record_files, write_config
from hearth.runtime.errors import HearthError
from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.generation import answer_check
from hearth.runtime.generation.answer_check import AnswerReport
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.known_answer import KnownAnswer, load_answer
from hearth.runtime.options import RuntimeOptions, SpeculationOptions
from hearth.runtime.request import GenerationRequest, RequestOptions, RowRequest
from tests.references import NAMES, reference_folder
from tests.runtime.conftest import EngineFolders

COARSE = [
    ExportOptions(dtype="float16"),
    ExportOptions(quantization="int8"),
    ExportOptions(quantization="int4"),
    ExportOptions(dtype="float16", quantization="int8"),
]


def opened(folder: Path, **options: Any) -> LLMInferenceRuntime:
    runtime = LLMInferenceRuntime.open(folder, RuntimeOptions(threads=1, **options))
    runtime.capture([1, runtime.max_batch])
    return runtime


def answer_of(folder: Path) -> KnownAnswer:
    answer = load_answer(folder, load_config(folder))
    assert answer is not None
    return answer


def checked(folder: Path, **options: Any) -> AnswerReport:
    runtime = opened(folder, **options)
    try:
        return runtime.check_answer(answer_of(folder))
    finally:
        runtime.close()


def refusal(folder: Path) -> HearthError:
    with pytest.raises(HearthError) as caught:
        checked(folder)
    assert (caught.value.code, caught.value.field) == ("wrong_answer", "engine")
    return caught.value


class Weights:
    """The weights in an engine folder's data file, changed together with the digest."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        found = ir.load(folder / MODEL_FILE).graph.initializers.values()
        self._places = {
            str(value.name): value.const_value
            for value in found
            if isinstance(value.const_value, ir.ExternalTensor)
        }
        self._data = bytearray((folder / DATA_FILE).read_bytes())

    def part(self, name: str) -> slice:
        place = self._places[name]
        assert place.offset is not None
        assert place.length is not None
        return slice(place.offset, place.offset + place.length)

    def zero(self, name: str, share: float = 1.0) -> None:
        part = self.part(name)
        size = int((part.stop - part.start) * share)
        self._data[part.start : part.start + size] = bytes(size)

    def swap_layers(self, one: int, other: int) -> None:
        for name in self._places:
            if name.startswith(f"layers.{one}/"):
                here, there = self.part(name), self.part(name.replace(str(one), str(other), 1))
                self._data[here], self._data[there] = self._data[there], self._data[here]

    def fill(self, name: str, value: NDArray[Any]) -> None:
        part = self.part(name)
        size = part.stop - part.start
        self._data[part] = value.tobytes() * (size // value.nbytes)

    def save(self) -> Path:
        (self._folder / DATA_FILE).write_bytes(self._data)
        files = record_files(self._folder)
        write_config(self._folder, structs.replace(load_config(self._folder), files=files))
        return self._folder


@pytest.fixture
def weights(engine_folders: EngineFolders, dialect: str, tmp_path: Path) -> Weights:
    return Weights(shutil.copytree(engine_folders("qwen3", dialect), tmp_path / "engine"))


@pytest.mark.parametrize("name", NAMES)
def test_every_family_gives_its_answer(
    engine_folders: EngineFolders, dialect: str, name: str
) -> None:
    report = checked(engine_folders(name, dialect))
    assert report.error < 0.1 * report.tolerance
    assert report.steps <= 64
    assert report.compared > report.steps


def test_an_engine_that_takes_adapters_answers_as_one_without(
    engine_folders: EngineFolders, tmp_path: Path, dialect: Any
) -> None:
    folder = tmp_path / "engine"
    export_model(reference_folder("qwen3"), folder, ExportOptions(dialect=dialect, max_lora_rank=8))
    plain = engine_folders("qwen3", dialect)
    assert answer_of(folder) == answer_of(plain)
    assert checked(folder).error == checked(plain).error


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", COARSE)
def test_every_type_gives_its_answer(
    tmp_path: Path, dialect: Any, name: str, options: ExportOptions
) -> None:
    if (NAMES.index(name) + COARSE.index(options)) % 2 != (dialect == "classic"):
        pytest.skip("families and types meet in one dialect each")
    folder = tmp_path / "engine"
    export_model(reference_folder(name), folder, structs.replace(options, dialect=dialect))
    report = checked(folder)
    assert 0 < report.error < report.tolerance


def test_numbers_that_float16_does_not_hold_are_no_fault_on_a_cpu(
    tmp_path: Path, dialect: Any
) -> None:
    source = shutil.copytree(reference_folder("qwen2"), tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        for part, factor in (("gate", 50), ("up", 2e4), ("down", 1e-5)):
            if f"{part}_proj" in name:
                tensors[name] = tensor * np.asarray(factor, tensor.dtype)
    save_file(tensors, source / "model.safetensors")
    folder, options = tmp_path / "engine", ExportOptions(dtype="float16", dialect=dialect)
    export_model(source, folder, options)
    report = checked(folder)
    assert 0 < report.error < report.tolerance
    with pytest.raises(HearthError) as caught:
        export_model(
            source, tmp_path / "gpu", structs.replace(options, backend="onnxruntime", device="cuda")
        )
    assert caught.value.code == "model_invalid"


def test_a_base_gives_its_answer_beside_its_draft(
    tree_folders: EngineFolders, dialect: str
) -> None:
    folder = tree_folders("qwen3", dialect)
    report = checked(folder, speculation=SpeculationOptions(method="auto"))
    assert report.error < 0.1 * report.tolerance


def test_a_zeroed_block_is_refused_though_its_checksum_is_right(weights: Weights) -> None:
    weights.zero("layers.2/down", 0.25)
    error = refusal(weights.save())
    assert "should lead by" in error.message
    assert "export the model again" in error.message


@pytest.mark.parametrize("options", COARSE)
@pytest.mark.parametrize("damage", ["zero", "swap"])
def test_damage_is_refused_of_every_type(
    tmp_path: Path, dialect: Any, options: ExportOptions, damage: str
) -> None:
    folder = tmp_path / "engine"
    export_model(reference_folder("qwen2"), folder, structs.replace(options, dialect=dialect))
    weights = Weights(folder)
    if damage == "zero":
        weights.zero("layers.1/output")
    else:
        weights.swap_layers(0, 1)
    refusal(weights.save())


def test_two_layers_that_are_swapped_are_refused(weights: Weights) -> None:
    weights.swap_layers(0, 1)
    refusal(weights.save())


def test_an_engine_without_finite_numbers_is_refused(weights: Weights) -> None:
    weights.fill("layers.0/output", np.array(np.nan, np.float32))
    assert "no finite numbers" in refusal(weights.save()).message


def test_the_refusal_names_position_expected_and_got(
    engine_folders: EngineFolders, dialect: str
) -> None:
    folder = engine_folders("llama", dialect)
    answer = answer_of(folder)
    other = (answer.best[16] + 1) % 288
    wrong = structs.replace(answer, best=(*answer.best[:16], other, *answer.best[17:]))
    runtime = opened(folder)
    with pytest.raises(HearthError) as caught:
        runtime.check_answer(wrong)
    runtime.close()
    assert "decode, batch 1, position 16" in caught.value.message
    assert f"token {other} should lead" in caught.value.message
    assert f"token {answer.best[16]} leads by {answer.leads[16]:.3f}" in caught.value.message


def test_captured_steps_are_what_is_checked(
    engine_folders: EngineFolders, dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_check, "SECONDS", 600.0)
    runtime = opened(engine_folders("qwen3", dialect))
    report = runtime.check_answer(answer_of(engine_folders("qwen3", dialect)))
    counters = runtime.counters
    assert counters.hits == 32
    assert report.steps == 35
    runtime.close()


def test_a_slow_engine_is_asked_less(
    engine_folders: EngineFolders, dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_check, "SECONDS", 0.0)
    report = checked(engine_folders("qwen3", dialect))
    # One row: 32 ids, and 16 with two steps. Eight rows: one id each, with two steps.
    assert report.steps == 1 + 3 + 3
    assert report.compared == 1 + 3 + 8 * 3


@pytest.mark.parametrize(
    "limits", [{"max_batch": 1}, {"max_batch": 3}, {"capacity": 2}, {"capacity": 4, "max_batch": 5}]
)
def test_the_answer_is_given_within_the_limits_asked_for(
    engine_folders: EngineFolders, dialect: str, limits: dict[str, int]
) -> None:
    report = checked(engine_folders("llama", dialect), **limits)
    assert report.compared >= report.steps > 0
    assert report.error < 0.1 * report.tolerance


def test_short_chunks_give_the_answer(tmp_path: Path, dialect: Any) -> None:
    folder = tmp_path / "engine"
    export_model(reference_folder("qwen3"), folder, ExportOptions(dialect=dialect, prefill_chunk=5))
    report = checked(folder)
    assert report.error < 0.1 * report.tolerance


def test_the_check_leaves_nothing_behind(engine_folders: EngineFolders, dialect: str) -> None:
    folder = engine_folders("qwen3", dialect)
    runtime = opened(folder)
    options = RequestOptions(max_tokens=6, ignore_eos=True)
    rows = [RowRequest(token_ids=[5, 9, 11], prompt_length=3, options=options)]
    before = runtime.handle_request(GenerationRequest(rows=rows)).rows
    tokens = runtime.generation_metrics.tokens
    runtime.check_answer(answer_of(folder))
    assert runtime.generation_metrics.tokens == tokens
    assert runtime.handle_request(GenerationRequest(rows=rows)).rows == before
    runtime.close()


def test_a_running_batch_is_not_disturbed(engine_folders: EngineFolders, dialect: str) -> None:
    folder = engine_folders("qwen3", dialect)
    runtime = opened(folder)
    runtime.admit([RowRequest(token_ids=[5], prompt_length=1)])
    with pytest.raises(HearthError) as caught:
        runtime.check_answer(answer_of(folder))
    assert caught.value.code == "internal"
    runtime.close()
