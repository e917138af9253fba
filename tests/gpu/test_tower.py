"""Vision towers on a GPU: known answers, beside rows as one more engine, and in a daemon."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from hearth.daemon.own_daemon import own_daemon
from hearth.runtime.device.device import Device
from hearth.runtime.device.open import open_device
from hearth.runtime.executor.engine import EngineOptions
from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.export.options import Dialect, TargetType
from hearth.runtime.export.vision.write import write_vision
from hearth.runtime.generation.assembly import share_context_memory
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.generation.vision_scheduler import TowerWork
from hearth.runtime.options import RuntimeOptions
from hearth.runtime.request import RequestOptions, RowRequest
from hearth.runtime.tensors.tensor import numpy_dtype
from hearth.runtime.tower_answer import answer_pictures, check_tower_answer, load_tower_answer
from hearth.runtime.vision.vision_runner import VisionRunner
from hearth.runtime.vision_config import VISION_FOLDER, load_vision_config
from hearth_client import Client, Image
from tests.daemon.test_seeing import picture, seen
from tests.vision_models import FAMILIES, Family, write_vision_model

PLANS_VARIABLE = "HEARTH_TEST_VISION_PLANS"
"""Names a folder of engine folders that see, whose plans this machine can run."""


@pytest.fixture
def device() -> Iterator[Device]:
    with closing(open_device("cuda")) as opened:
        yield opened


def answers_right(engine: Path, device: Device) -> None:
    config, folder = load_vision_config(engine), engine / VISION_FOLDER
    assert config is not None
    with closing(VisionRunner.open(folder, config, EngineOptions(), device)) as runner:
        share_context_memory([runner.executor], device)
        report = check_tower_answer(runner, folder)
    assert report.error < 1


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dialect", "dtype"), [("native", "float16"), ("classic", "float16"), ("classic", "float32")]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_onnx_runtime_gives_the_known_answer(
    tmp_path: Path, family: Family, dialect: Dialect, dtype: TargetType, device: Device
) -> None:
    source = write_vision_model(tmp_path / "m", family)
    write_vision(
        source,
        tmp_path,
        ExportOptions(dialect=dialect, dtype=dtype, backend="onnxruntime", device="cuda"),
    )
    answers_right(tmp_path, device)


@pytest.mark.gpu
def test_plans_give_the_known_answer(device: Device) -> None:
    folder = os.environ.get(PLANS_VARIABLE)
    if not folder:
        pytest.skip(f"{PLANS_VARIABLE} names no folder")
    engines = [path.parent for path in sorted(Path(folder).glob(f"*/{VISION_FOLDER}"))]
    assert engines
    for engine in engines:
        answers_right(engine, device)


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
        for done in result.pictures:
            assert done.error is None
            assert done.engine_s > 0
            left.remove(done.number)
    assert not left
    return tokens


@pytest.mark.timeout(300)
@pytest.mark.gpu
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


@pytest.mark.timeout(300)
@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_pictures_of_several_clients_are_seen_beside_text(tmp_path: Path, family: Family) -> None:
    models = write_vision_model(tmp_path / "model", family), tmp_path / "engine"
    options = ExportOptions(backend="onnxruntime", device="cuda", max_batch=4, capacity=256)
    export_model(*models, options)

    def ask(seed: int) -> tuple[list[int], float, int]:
        with Client(daemon.socket, timeout=60) as client:
            tokens, usage = seen(client, "look: ", Image(picture(seed)), "?")
            assert usage is not None
            return tokens, usage.engine_ms, usage.cached

    def say(seed: int) -> list[int]:
        with Client(daemon.socket, timeout=60) as client:
            return seen(client, f"text alone {seed}")[0]

    with own_daemon(models[1]) as daemon, ThreadPoolExecutor(8) as pool:
        alone = [say(seed) for seed in range(4)]
        answers, texts = pool.map(ask, range(8)), list(pool.map(say, range(4)))
        first = list(answers)
        again = [ask(seed) for seed in range(8)]
    assert texts == alone
    assert all(engine_ms > 0 and not cached for _, engine_ms, cached in first)
    assert all(cached for _, _, cached in again)
    assert [tokens for tokens, *_ in again] == [tokens for tokens, *_ in first]
