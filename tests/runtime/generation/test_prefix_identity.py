"""What makes two prompts begin alike: their tokens, the pictures among them, and the adapter."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.images import EmbeddedImage, ImageSpan
from hearth.runtime.request import RowRequest
from tests.peft_models import write_peft
from tests.references import reference_folder
from tests.runtime.generation.image_models import STORE
from tests.runtime.generation.prefix_rows import (
    check_equal,
    computed,
    needs_native,
    open_pages,
    prompt,
    row,
    run,
)
from tests.vision_models import TEXT, write_vision_model

pytestmark = needs_native
GRID, TOKENS, BEFORE = (1, 5, 8), 40, 12
SHARED = prompt(70)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLMInferenceRuntime]:
    """A model with 3-D positions, rotary tables of each row and deepstack features."""
    place = tmp_path_factory.mktemp("seeing")
    source = write_vision_model(place / "model", "qwen3_vl")
    options = ExportOptions(dialect="native", prefill_chunk=16, max_batch=3, capacity=256)
    export_model(source, place / "engine", options)
    with closing(open_pages(place / "engine", embeddings=STORE)) as opened:
        yield opened


def picture(seed: int, *, key: bytes | None = None) -> EmbeddedImage:
    """An image of 40 tokens behind 12 of text; its key goes by what it shows."""
    shape = (3, TOKENS, TEXT["hidden_size"])
    values = np.random.default_rng(seed).normal(0, 0.7, shape).astype(np.float32)
    own = bytes([seed]) * 16 if key is None else key
    return EmbeddedImage(STORE.put(values), TOKENS, (ImageSpan(BEFORE, TOKENS, 0, GRID),), own)


def asks(image: EmbeddedImage, *end: int) -> RowRequest:
    """Text, the image, and text again."""
    ids = [*range(20, 20 + BEFORE), *[5] * TOKENS, *range(30, 36), *end]
    return structs.replace(row(ids), images=[image])


def unaided(request: RowRequest) -> RowRequest:
    return structs.replace(request, options=structs.replace(request.options, cache="bypass"))


def test_a_picture_is_part_of_what_prompts_share(seeing: LLMInferenceRuntime) -> None:
    run(seeing, asks(picture(1), 40))
    # It comes again, at another place of the store.
    again = asks(picture(1), 41)
    found = run(seeing, again)
    assert found.cached == {0: BEFORE + TOKENS + 6}
    check_equal(found.tokens[0], run(seeing, unaided(again)).tokens[0], exact=True)
    # The same ids with another picture share the text before it alone.
    other = asks(picture(2), 41)
    found = run(seeing, other)
    assert found.cached == {0: BEFORE}
    check_equal(found.tokens[0], run(seeing, unaided(other)).tokens[0], exact=True)
    assert found.tokens[0][0].top != run(seeing, again).tokens[0][0].top


def test_a_picture_of_which_nobody_knows_what_it_is_shares_nothing(
    seeing: LLMInferenceRuntime,
) -> None:
    request = asks(picture(3, key=b""), 40)
    for _ in range(2):
        computed(seeing)
        assert run(seeing, request).cached == {0: BEFORE}
        assert computed(seeing) == len(request.token_ids) - BEFORE


def test_a_prefix_may_end_within_a_picture(
    seeing: LLMInferenceRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = asks(picture(4), 40)
    wanted = run(seeing, unaided(request)).tokens[0]
    run(seeing, request)
    cut = BEFORE + 17
    monkeypatch.setattr("hearth.runtime.kv_cache.page_loads.LoadCostModel.tokens", lambda *_: cut)
    found = run(seeing, request)
    assert found.cached == {0: cut}
    check_equal(found.tokens[0], wanted, exact=True)


def test_an_adapter_shares_with_itself_alone(tmp_path: Path) -> None:
    base = reference_folder("qwen3")
    write_peft(base, tmp_path / "one", rank=4)
    write_peft(base, tmp_path / "other", rank=4, seed=1)
    options = ExportOptions(dialect="native", max_lora_rank=4)
    export_model(base, tmp_path / "engine", options)
    with closing(open_pages(tmp_path / "engine")) as runtime:
        for name in ("one", "other"):
            runtime.load_adapter(name, tmp_path / name)
        first = {}
        for name in ("", "one", "other"):
            first[name] = run(runtime, row(SHARED, adapter=name))
            assert first[name].cached == {}
        for name in ("other", "", "one"):
            found = run(runtime, row(SHARED, adapter=name))
            assert found.cached == {0: len(SHARED) - 1}
            # The products of an adapter's numbers round a single row differently.
            check_equal(found.tokens[0], first[name].tokens[0], exact=not name)
        # Of what an adapter has left nothing serves another one of its name.
        runtime.unload_adapter("one")
        runtime.load_adapter("one", tmp_path / "other")
        found = run(runtime, row(SHARED, adapter="one"))
        assert found.cached == {0: len(SHARED) - 1}
        check_equal(found.tokens[0], first["other"].tokens[0], exact=False)
