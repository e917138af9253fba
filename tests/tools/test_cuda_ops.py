"""The ops that the bench times, each once and on the CPU: their buffers and settings fit."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hearth.runtime.device.open import open_device
from tools import cuda_ops


class Once:
    """A clock that calls every op once; `gpu` is the CPU, with the GPU's way to fill memory."""

    def __init__(self) -> None:
        self.gpu: Any = open_device("cpu")

    def time(self, name: str, op: Callable[[], object], calls: int = 1) -> dict[str, float]:
        assert calls > 0
        op()
        return {f"{name}_python_us": 1.0, f"{name}_gpu_us": 1.0}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_ops, "VOCAB", 300)
    monkeypatch.setattr(cuda_ops, "HALF", np.float32)
    for name in ("HIDDEN", "HEAD_DIM", "HEADS", "LAYERS"):
        monkeypatch.setattr(cuda_ops, name, 2)


@pytest.mark.parametrize("rows", [1, 3])
def test_every_figure_has_an_op_that_runs(rows: int) -> None:
    clock: Any = Once()
    steps = cuda_ops.time_steps(clock, rows)
    assert len(steps) == 2 * 5
    assert len(cuda_ops.time_sampling(clock, rows)) == 2 * 7
    assert len(cuda_ops.time_walks(clock, rows)) == 2 * 4
    assert list(cuda_ops.time_commit(clock, rows)) == ["commit_python_us", "commit_gpu_us"]


def test_the_buffers_of_trees_are_those_of_the_default_tree() -> None:
    proposal = cuda_ops._proposal(open_device("cpu"), 2)  # type: ignore[arg-type] # in place of a GPU
    assert proposal.ids.shape == (2, cuda_ops.DRAFTING.proposal_size)
    assert proposal.table_scores.shape == (2, cuda_ops.DRAFTING.table_size)
    assert cuda_ops._trees(open_device("cpu"), 2).parents.shape == (2, 60)  # type: ignore[arg-type] # likewise
