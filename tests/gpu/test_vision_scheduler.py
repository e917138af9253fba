"""A vision tower beside rows on a GPU, as one more engine of a runtime."""

from contextlib import closing
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.generation.vision_scheduler import TowerWork
from hearth.runtime.options import RuntimeOptions
from hearth.runtime.request import RequestOptions, RowRequest
from hearth.runtime.tensors.tensor import numpy_dtype
from hearth.runtime.tower_answer import answer_pictures, load_tower_answer
from hearth.runtime.vision_config import VISION_FOLDER
from tests.vision_models import FAMILIES, Family, write_vision_model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
ROUNDS = 4


def rows(tokens: int) -> list[RowRequest]:
    options = RequestOptions(max_tokens=tokens, ignore_eos=True)
    return [
        RowRequest(token_ids=[7, 8, 9, seed], prompt_length=4, options=options) for seed in (10, 11)
    ]


def tokens_of(runtime: LLMInferenceRuntime, works: list[TowerWork]) -> dict[int, list[int]]:
    """What rows say while a tower is at these pictures, which all succeed."""
    tokens: dict[int, list[int]] = {}
    left = {work.number for work in works}
    runtime.admit(rows(48))
    for work in works:
        runtime.run_tower(work)
    while runtime.active:
        result = runtime.step()
        for token in result.tokens:
            tokens.setdefault(token.row, []).append(token.token_id)
        for picture in result.pictures:
            assert picture.error is None
            assert picture.engine_s > 0
            left.remove(picture.number)
    assert not left
    return tokens


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_are_right_and_text_beside_them_is_what_it_is_alone(
    tmp_path: Path, family: Family, dtype: Literal["float32", "float16"]
) -> None:
    models = write_vision_model(tmp_path / "model", family), tmp_path / "engine"
    options = ExportOptions(
        backend="onnxruntime", device="cuda", dtype=dtype, capacity=256, max_batch=2
    )
    export_model(*models, options)
    with closing(LLMInferenceRuntime.open(models[1], RuntimeOptions())) as runtime:
        runtime.capture([1, 2])
        assert runtime.tower is not None
        config = runtime.tower.config
        answer = load_tower_answer(models[1] / VISION_FOLDER, config)
        alone = tokens_of(runtime, [])
        works, outs = [], []
        for number in range(ROUNDS):
            out = []
            for place, (patches, layout) in enumerate(answer_pictures(config)):
                shape = (1 + config.num_deepstack_features, layout.tokens, config.output_size)
                out.append(np.zeros(shape, numpy_dtype(config.dtype)))
                works.append(TowerWork(10 * number + place, layout, patches, out[-1]))
            outs.append(out)
        hits = runtime.counters.hits
        assert tokens_of(runtime, works) == alone
        assert runtime.counters.hits > hits
        for out in outs:
            assert answer.compare(out).error < 1
        assert runtime.get_multimodal_metrics().encoded == len(works)
