"""The shipped model by kernels: two models in one engine, eight and four bits, a daemon."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from hearth.daemon.own_daemon import own_daemon
from hearth.daemon.shipped_files import EXAMPLE_HOME
from hearth.runtime.config import Quantization
from hearth.runtime.export import DraftOptions, ExportOptions, export_model
from hearth.runtime.export.export import export_weights
from hearth.runtime.files import cache_folder
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.options import RuntimeOptions
from hearth.runtime.request import RequestOptions, RowRequest
from hearth.runtime.weights.external_weight_manager import answer_of
from hearth_client import Client
from tests.gpu.conftest import DRAFT, MODEL
from tests.runtime.weights.external_models import Given, tuned

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

OPTIONS = ExportOptions(device="cuda", dtype="float16", capacity=512, max_batch=8)
QUESTIONS = (
    "turn on the desk lamp",
    "set the main thermostat to 21 degrees",
    "is the front door locked?",
    "list all devices",
    "tell me a story",
)


def spoken(folder: Path, weights: str = "") -> Given:
    """What three rows get, with the logarithms of what was likeliest, once the answer is right."""
    asked = RequestOptions(max_tokens=40, ignore_eos=True, logprobs=3)
    rows = [RowRequest(token_ids=[1, 20 + n, 60], prompt_length=3, options=asked) for n in range(3)]
    options = RuntimeOptions(max_batch=4, weights=weights)
    with closing(LLMInferenceRuntime.open(folder, options)) as runtime:
        runtime.capture([1, 2, 4])
        assert runtime.counters.failed_captures == 0, runtime.counters.failure
        answer = answer_of(folder, runtime.config, weights)
        assert answer is not None
        runtime.check_answer(answer)
        assert runtime.loaded_weights is not None
        runtime.admit(rows)
        given: Given = []
        while runtime.active:
            for one in runtime.step().tokens:
                given.append((one.row, one.token_id, [top.logprob for top in one.top]))
    # In each row's own order.
    return sorted(given, key=lambda one: one[0])


def test_weights_of_another_model_have_the_bits_of_its_own_engine(tmp_path: Path) -> None:
    other = tuned(MODEL, tmp_path / "other")
    for model, engine in ((MODEL, "engine"), (other, "own")):
        export_model(model, tmp_path / engine, OPTIONS)
    weights = tmp_path / "weights.safetensors"
    export_weights(other, tmp_path / "engine", weights)
    given = spoken(tmp_path / "engine", str(weights))
    assert given == spoken(tmp_path / "own")
    assert given != spoken(tmp_path / "engine")


def test_a_reply_through_a_daemon_is_the_same_among_others_and_alone(tmp_path: Path) -> None:
    options = structs.replace(OPTIONS, draft=DraftOptions(folder=DRAFT), capacity=1024)
    export_model(MODEL, tmp_path / "engine", options)

    def ask(question: str) -> list[int]:
        turns = [
            {"role": "system", "content": EXAMPLE_HOME},
            {"role": "user", "content": question},
        ]
        with Client(daemon.socket, timeout=60) as client:
            generation = client.generate(messages=turns, max_tokens=60)
            generation.text()
            return list(generation.tokens)

    flags, kept = ("--speculation", "eagle"), {"HEARTH_CACHE": str(cache_folder())}
    with (
        own_daemon(tmp_path / "engine", flags, environ=kept) as daemon,
        ThreadPoolExecutor(len(QUESTIONS)) as pool,
    ):
        together = list(pool.map(ask, QUESTIONS))
        alone = [ask(question) for question in QUESTIONS]
    assert together == alone
    assert all(together)


@pytest.mark.parametrize(
    ("kind", "head"), [("int8", "body"), ("int4", "body"), ("int4", "none"), ("none", "int8")]
)
def test_known_answers_of_integers_are_right(tmp_path: Path, kind: Quantization, head: Any) -> None:
    options = structs.replace(OPTIONS, quantization=kind, head_quantization=head)
    export_model(MODEL, tmp_path / "engine", options)
    assert len(spoken(tmp_path / "engine")) == 3 * 40


def test_a_draft_of_integers_opens_beside_its_base(tmp_path: Path) -> None:
    plain = structs.replace(OPTIONS, quantization="int4")
    drafted = structs.replace(plain, draft=DraftOptions(folder=DRAFT))
    for name, options in (("plain", plain), ("drafted", drafted)):
        export_model(MODEL, tmp_path / name, options)
    one, other = (spoken(tmp_path / name) for name in ("plain", "drafted"))
    assert [given[:2] for given in one] == [given[:2] for given in other]
