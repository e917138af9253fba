import sys

import pytest

from hearth.bench.contenders.contender import ContenderName, Job, open_contender
from hearth.bench.contenders.floor import MemoryFloor
from hearth.runtime.errors import HearthError


@pytest.mark.parametrize(
    ("contender", "module", "library"),
    [
        ("transformers", "torch_models", "torch"),
        ("llama_cpp", "llama_cpp_model", "llama_cpp"),
    ],
)
def test_a_missing_library_is_named(
    contender: ContenderName, module: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, f"hearth.bench.contenders.{module}", raising=False)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError) as caught:
        open_contender(Job(contender=contender))
    assert caught.value.name == library


def test_the_floor_needs_no_library() -> None:
    model = open_contender(Job(contender="floor", bytes=1 << 20, threads=2))
    assert isinstance(model, MemoryFloor)
    assert (model.prefill(), model.step(), model.precision) == (0, 0, "")
    model.close()


def test_only_an_engine_has_launches_of_its_own() -> None:
    model = open_contender(Job(contender="floor", bytes=1 << 20))
    with pytest.raises(HearthError, match="no launches"):
        model.launch(2)
    model.close()
