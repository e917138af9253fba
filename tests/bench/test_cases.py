import json
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from bench import cases
from bench.cases import CASES, Artifacts, prepare, weight_bytes
from runtime.errors import HearthError


def nothing(stage: str, done: int, total: int) -> None:
    assert stage
    assert 0 <= done <= total


def float_bytes(source: Path) -> int:
    total = 0
    for path in source.glob("*.safetensors"):
        with safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118 - the file is no mapping
                total += 4 * int(np.prod(file.get_slice(name).get_shape()))
    return total


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def prepared(cache: Path, name: str) -> Artifacts:
    return prepare(CASES[name], cache, nothing, quick=True)


def test_a_float_step_reads_every_weight_once(cache: Path) -> None:
    found = prepared(cache, "0.6b/fp32")
    # Beside the weights the graph holds a few constants of shapes and masks.
    assert float_bytes(found.source) <= found.weight_bytes < 1.02 * float_bytes(found.source)


def test_quantised_steps_read_less(cache: Path) -> None:
    sizes = [prepared(cache, f"0.6b/{kind}").weight_bytes for kind in ("fp32", "int8", "int4")]
    assert sizes[0] > 3 * sizes[1] > 5 * sizes[2]


def test_the_second_time_everything_is_there(cache: Path) -> None:
    first = prepared(cache, "0.6b/fp32")
    written = first.engine.stat().st_mtime_ns
    assert prepared(cache, "0.6b/fp32") == first
    assert first.engine.stat().st_mtime_ns == written
    assert first.weight_bytes == weight_bytes(first.engine)


def test_a_changed_exporter_replaces_the_engine(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepared(cache, "0.6b/int8")
    monkeypatch.setattr(cases, "made_digest", lambda *_: "another")
    second = prepared(cache, "0.6b/int8")
    assert second.engine.name == "quick-int8-another"
    assert not first.engine.exists()


def test_without_the_converter_there_is_no_gguf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert prepared(tmp_path, "0.6b/fp32").gguf is None


def test_an_absent_shipped_model_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "SOURCE", tmp_path / "home")
    with pytest.raises(HearthError) as caught:
        prepared(tmp_path, "tiny/fp32")
    assert caught.value.code == "engine_missing"


def test_the_shipped_model_is_read_where_it_lies(
    quick_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cases, "SOURCE", quick_model)
    found = prepared(tmp_path, "tiny/fp32")
    assert found.source == quick_model
    assert json.loads((found.engine / "config.json").read_text())["max_supported_batch_size"] == 1
