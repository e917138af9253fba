import time
from typing import Any

import pytest

pytestmark = pytest.mark.reference
pytest.importorskip("torch")
transformers_model = pytest.importorskip("bench.transformers_model")


class SlowModel:
    def __init__(self, seconds: float) -> None:
        self.steps = 0
        self._seconds = seconds

    def step(self) -> int:
        self.steps += 1
        time.sleep(self._seconds)
        return 0


@pytest.mark.parametrize(("best", "steps"), [(float("inf"), 4), (0.005, 4), (0.001, 1)])
def test_a_hopeless_precision_is_dropped_at_once(best: float, steps: int) -> None:
    model: Any = SlowModel(0.006)
    assert transformers_model._trial(model, best) >= 0.006
    assert model.steps == steps
