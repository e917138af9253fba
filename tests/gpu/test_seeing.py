"""A daemon whose executor runs the vision tower on a GPU, between the steps of rows."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hearth.daemon.own_daemon import own_daemon
from hearth.runtime.export import ExportOptions, export_model
from hearth_client import Client, Image
from tests.daemon.test_seeing import picture, seen
from tests.vision_models import FAMILIES, Family, write_vision_model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


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
