import sys

import pytest

from bench.contenders import FloorModel, load
from bench.worker_messages import Contender, Job


@pytest.mark.parametrize(
    ("contender", "library"), [("transformers", "torch"), ("llama_cpp", "llama_cpp")]
)
def test_a_missing_library_is_named(
    contender: Contender, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, f"bench.{contender}_model", raising=False)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError) as caught:
        load(Job(contender=contender))
    assert caught.value.name == library


def test_the_floor_needs_no_library() -> None:
    model = load(Job(contender="floor", bytes=1 << 20, threads=2))
    assert isinstance(model, FloorModel)
    assert (model.first, model.step(), model.precision) == (0, 0, "")
