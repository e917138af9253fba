from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from hearth.runtime.config import BASE_CONFIG_FILE, Drift, load_config
from hearth.runtime.engine_folder import ANSWER_FILE, DRAFT_FOLDER
from hearth.runtime.errors import HearthError
from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.export.checkpoint import Checkpoint
from hearth.runtime.export.engine_files import engine_config
from hearth.runtime.export.known_answer import (
    ReferenceLogits,
    ToleranceProbe,
    known_answer,
    measure_drift,
    run_probe,
    unquantised,
)
from hearth.runtime.export.model_config import load_model_config
from hearth.runtime.export.reference_pass import RoundedWeights, reference_logits
from hearth.runtime.known_answer import KnownAnswer, load_answer
from tests.references import NAMES, reference_folder
from tests.references import reference_logits as stored_logits
from tests.runtime.conftest import EngineFolders
from tests.runtime.export.hugging_face import change_tensors, copy_model


def answer_of(folder: Path, options: ExportOptions | None = None) -> KnownAnswer:
    model = load_model_config(folder)
    config = engine_config(model, options or ExportOptions())
    return known_answer(
        run_probe(model, ToleranceProbe(Checkpoint(folder), config), config), config
    )


def test_the_answer_is_the_first_of_the_logits_and_its_lead() -> None:
    folder = reference_folder("qwen3")
    model = load_model_config(folder)
    answer = answer_of(folder)
    weights = RoundedWeights(Checkpoint(folder), engine_config(model, ExportOptions()))
    logits = reference_logits(model, weights, answer.token_ids)
    assert answer.best == tuple(logits.argmax(axis=1))
    ranked = np.sort(logits, axis=1)
    np.testing.assert_allclose(answer.leads, ranked[:, -1] - ranked[:, -2], atol=1e-4)
    assert answer.tolerance == pytest.approx(1e-3 * logits.std())


def test_a_tolerance_is_never_more_than_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hearth.runtime.export.known_answer.LEAST_TOLERANCE", 1e9)
    answer = answer_of(reference_folder("qwen3"))
    assert msgspec.json.decode(msgspec.json.encode(answer), type=KnownAnswer) == answer


def test_the_ids_are_many_and_from_all_over_the_vocabulary() -> None:
    answer = answer_of(reference_folder("qwen3"))
    assert len(set(answer.token_ids)) == 32
    assert {token * 8 // 288 for token in answer.token_ids} == set(range(8))
    assert len(set(answer.best)) > 8


@pytest.mark.parametrize(
    ("options", "roundings"),
    [
        (ExportOptions(dtype="float16"), 10),
        (ExportOptions(dtype="bfloat16", backend="onnxruntime", device="cuda"), 10),
        (ExportOptions(quantization="int8"), 3),
        (ExportOptions(dtype="float16", quantization="int4"), 3),
    ],
)
def test_a_lead_may_be_off_by_what_rounded_inputs_make_of_it(
    options: ExportOptions, roundings: int
) -> None:
    folder = reference_folder("llama")
    model = load_model_config(folder)
    config = engine_config(model, options)
    weights = RoundedWeights(Checkpoint(folder), config)
    answer = answer_of(folder, options)
    ids = list(answer.token_ids)
    exact, rounded = reference_logits(model, ToleranceProbe(Checkpoint(folder), config), [ids, ids])
    np.testing.assert_allclose(exact, reference_logits(model, weights, ids), rtol=0, atol=1e-4)
    off = 0.0
    for lead, best, logits in zip(answer.leads, answer.best, rounded, strict=True):
        off = max(off, abs(lead - float(logits[best] - np.delete(logits, best).max())))
    assert answer.tolerance == pytest.approx(roundings * off)
    assert off > 0.002


def test_ids_end_before_one_that_no_bias_forces(tmp_path: Path) -> None:
    folder = copy_model("llama", tmp_path / "m")
    whole = answer_of(folder)
    unlikely = whole.token_ids[9]

    def lift_all_others(tensors: dict[str, np.ndarray]) -> None:
        tensors["lm_head.weight"] *= 20
        tensors["lm_head.weight"][unlikely] *= 50

    change_tensors(folder, lift_all_others)
    ids = answer_of(folder).token_ids
    assert 1 <= len(ids) < 32
    assert ids == whole.token_ids[: len(ids)]


def test_a_model_without_finite_numbers_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    folder = copy_model("llama", tmp_path / "m")
    change_tensors(folder, lambda tensors: tensors["lm_head.weight"].fill(3e38))
    with pytest.raises(HearthError, match="not finite") as caught:
        export_model(folder, tmp_path / "engine", ExportOptions())
    assert caught.value.code == "model_invalid"
    assert not (tmp_path / "engine").exists()


def test_a_folder_keeps_its_answer_beside_its_digest(engine_folders: EngineFolders) -> None:
    folder = engine_folders("qwen3", "classic")
    config = load_config(folder)
    assert ANSWER_FILE in config.files
    assert load_answer(folder, config) == answer_of(reference_folder("qwen3"))


def test_a_base_has_an_answer_and_its_draft_has_none(tree_folders: EngineFolders) -> None:
    folder = tree_folders("qwen3", "classic")
    assert (folder / BASE_CONFIG_FILE).exists()
    assert load_answer(folder, load_config(folder)) is not None
    assert load_answer(folder / DRAFT_FOLDER, load_config(folder / DRAFT_FOLDER)) is None


def drift_of(options: ExportOptions) -> Drift:
    folder = reference_folder("qwen3")
    model, checkpoint = load_model_config(folder), Checkpoint(folder)
    config = engine_config(model, options)
    reference = run_probe(model, ToleranceProbe(checkpoint, config), config)
    return measure_drift(model, RoundedWeights(checkpoint, unquantised(config)), reference)


def test_fewer_bits_drift_further() -> None:
    none, eight, mixed, four = map(
        drift_of,
        (
            ExportOptions(),
            ExportOptions(quantization="int8"),
            ExportOptions(quantization="int4", head_quantization="int8"),
            ExportOptions(quantization="int4", head_quantization="int4"),
        ),
    )
    assert (none.positions, none.same) == (32, 32)
    assert none.mean == pytest.approx(0, abs=1e-9)
    assert none.mean < eight.mean < mixed.mean < four.mean
    for one in (eight, mixed, four):
        assert 0 < one.same <= 32
        assert one.mean < one.largest


def test_a_drift_is_the_divergence_of_all_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = np.array([[0.5, 0.25, 0.25], [0.2, 0.7, 0.1]], np.float32)
    found = np.array([[0.25, 0.5, 0.25], [0.2, 0.7, 0.1]], np.float32)
    logits = np.log(shares) + np.float32(7)
    monkeypatch.setattr("hearth.runtime.export.known_answer.reference_logits", lambda *_: logits)
    reference = ReferenceLogits([0, 1], np.log(found), np.log(found))
    drift = measure_drift(cast("Any", None), cast("Any", None), reference)
    assert (drift.positions, drift.same) == (2, 1)
    assert drift.largest == pytest.approx(0.25 * np.log(2), abs=1e-6)
    assert drift.mean == pytest.approx(drift.largest / 2, abs=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_the_pass_gives_the_logits_of_the_reference(name: str) -> None:
    folder = reference_folder(name)
    model = load_model_config(folder)
    weights = RoundedWeights(Checkpoint(folder), engine_config(model, ExportOptions()))
    for row in stored_logits(name):
        logits = reference_logits(model, weights, row.token_ids)
        assert logits.dtype == np.float32
        np.testing.assert_allclose(logits, row.logits, rtol=0, atol=1e-4)
