"""What prompts and replies before have left, here or on disk, is not computed again."""

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from hearth.runtime.errors import HearthError
from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.images import EmbeddedImage, ImageSpan
from hearth.runtime.kv_cache.disk_cache import HEAD_BYTES
from hearth.runtime.request import RowRequest
from tests.peft_models import write_peft
from tests.references import reference_folder
from tests.runtime.generation.image_models import STORE
from tests.runtime.generation.prefix_rows import (
    EXACT_INT4,
    TOKENS,
    check_equal,
    computed,
    needs_native,
    open_pages,
    prompt,
    row,
    run,
)
from tests.vision_models import TEXT as IMAGE_TEXT
from tests.vision_models import write_vision_model

pytestmark = needs_native

SHARED = prompt(75)
Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Gives an engine folder: native, classic, or native with int4 weights."""

    @cache
    def made(name: str) -> Path:
        target = tmp_path_factory.mktemp("prefix") / name
        options = ExportOptions(
            dialect="classic" if name == "classic" else "native",
            quantization="int4" if name == "int4" else "none",
            head_quantization="body",
            prefill_chunk=32,
        )
        export_model(reference_folder("qwen3"), target, options)
        return target

    return made


@pytest.fixture
def runtime(folders: Folders) -> Iterator[LLMInferenceRuntime]:
    with closing(open_pages(folders("native"))) as opened:
        yield opened


@pytest.mark.parametrize("engine", ["native", EXACT_INT4, "classic"])
def test_a_second_prompt_that_begins_alike_is_computed_from_its_end_only(
    folders: Folders, engine: str
) -> None:
    with closing(open_pages(folders(engine))) as runtime:
        run(runtime, row(SHARED + prompt(9, 1)))
        assert computed(runtime) == 84
        second = SHARED + prompt(5, 2)
        found = run(runtime, row(second))
        assert computed(runtime) == 5
        assert found.cached == {0: 75}
        wanted = run(runtime, row(second, cache="bypass"))
        assert wanted.cached == {}
        assert computed(runtime) == 80
        # To the last bit, whichever chunks the keys and values come from.
        check_equal(found.tokens[0], wanted.tokens[0], exact=engine != "classic")
        assert runtime.prefill_metrics.reused == 75


@pytest.mark.parametrize("engine", ["native", EXACT_INT4])
def test_a_chat_pays_for_each_token_once(folders: Folders, engine: str) -> None:
    with closing(open_pages(folders(engine))) as runtime:
        text: list[int] = []
        for turn in range(6):
            text += prompt(11 + turn, turn)
            found = run(runtime, row(text))
            # All but the last token of the reply was computed by the steps that picked the next.
            assert computed(runtime) == 11 + turn + bool(turn)
            wanted = run(runtime, row(text, cache="bypass"))
            computed(runtime)
            check_equal(found.tokens[0], wanted.tokens[0], exact=True)
            text += found.reply()


def test_rows_share_what_is_kept_of_their_own_salt(runtime: LLMInferenceRuntime) -> None:
    text, salts = SHARED + prompt(5, 2), ("", "ours", "theirs")
    found = {salt: [run(runtime, row(text, cache_salt=salt)) for _ in range(2)] for salt in salts}
    for first, second in found.values():
        assert (first.cached, second.cached) == ({}, {0: len(text) - 1})
        check_equal(second.tokens[0], found[""][0].tokens[0], exact=True)


def test_the_last_token_of_a_prompt_is_always_computed(runtime: LLMInferenceRuntime) -> None:
    for length in (1, 31, 32, 33, 64, 75):
        runs = [run(runtime, row(SHARED[:length])) for _ in range(2)]
        wanted = run(runtime, row(SHARED[:length], cache="bypass"))
        assert runs[1].cached == ({0: length - 1} if length > 1 else {})
        for found in runs:
            check_equal(found.tokens[0], wanted.tokens[0], exact=True)


def test_rows_of_one_chunk_start_at_different_slots(runtime: LLMInferenceRuntime) -> None:
    run(runtime, row(SHARED))
    run(runtime, row(prompt(40, 3)))
    rows = [
        row([*SHARED, 4, 5]),
        row([*prompt(40, 3), 7, 8]),
        row(prompt(6, 5)),
        row([*SHARED[:50], 9]),
    ]
    steps = runtime.prefill_metrics.steps
    found = run(runtime, *rows)
    assert found.cached == {0: 75, 1: 40, 3: 50}
    assert runtime.prefill_metrics.steps == steps + 1
    for number, one in enumerate(rows):
        (wanted,) = run(runtime, bypassing(one)).tokens.values()
        check_equal(found.tokens[number], wanted, exact=True)


@pytest.mark.parametrize("after", [1, 3])
def test_a_row_that_joins_others_comes_with_its_prefix(
    runtime: LLMInferenceRuntime, after: int
) -> None:
    run(runtime, row(SHARED))
    # A long prefix makes the bucket grow where rows that decode lie.
    run(runtime, row(prompt(300, 8)))
    rows = [row(prompt(7, 4)), row([*SHARED, 6]), row([*prompt(300, 8), 6])]
    found = run(runtime, *rows, after=after)
    assert found.cached == {1: 75, 2: 300}
    for number, one in enumerate(rows):
        (wanted,) = run(runtime, bypassing(one)).tokens.values()
        check_equal(found.tokens[number], wanted, exact=True)


def test_a_row_that_was_put_back_goes_on_from_its_pages(runtime: LLMInferenceRuntime) -> None:
    request = row(SHARED)
    wanted = run(runtime, bypassing(request)).tokens[0]
    computed(runtime)
    (number,) = runtime.admit([request])
    tokens = [token for _ in range(3 + 4) for token in runtime.step().tokens]
    known = runtime.release(number)
    assert known == [token.token_id for token in tokens]
    assert computed(runtime) == 75
    again = RowRequest(token_ids=SHARED + known, prompt_length=len(SHARED), options=request.options)
    found = run(runtime, again)
    assert computed(runtime) == 1
    check_equal(tokens + found.tokens[0], wanted, exact=True)


def test_a_row_that_is_cancelled_leaves_what_it_has(runtime: LLMInferenceRuntime) -> None:
    (number,) = runtime.admit([row(SHARED)])
    runtime.step()
    runtime.leave(number)
    assert run(runtime, row(SHARED)).cached == {0: 32}


def test_who_bypasses_leaves_nothing(runtime: LLMInferenceRuntime) -> None:
    run(runtime, row(SHARED, cache="bypass"))
    assert run(runtime, row(SHARED)).cached == {}
    metrics = runtime.prefix_metrics
    assert metrics is not None
    assert (metrics.rows, metrics.hits, metrics.queried) == (1, 0, 75)


def test_texts_are_the_same_where_pages_have_to_go(folders: Folders) -> None:
    prompts = [prompt(40 + number, number) for number in range(4)]
    with closing(open_pages(folders("native"), pages=4)) as runtime:
        wanted = [run(runtime, row(one, cache="bypass")).tokens[0] for one in prompts]
        random = np.random.default_rng(2)
        for number in random.integers(0, 4, 12).tolist():
            found = run(runtime, row(prompts[number]))
            check_equal(found.tokens[0], wanted[number], exact=True)
        metrics = runtime.prefix_metrics
        assert metrics is not None
        assert 0 < metrics.hits < 12
        assert metrics.evicted > 0
        assert metrics.bytes["device"] <= 4 * runtime.memory["prefix_cache"] // 4


def test_what_is_pinned_stays_until_its_client_goes(folders: Folders) -> None:
    pinned = row(SHARED[:64], cache="pin", max_tokens=1)
    pinned.client = 7
    with closing(open_pages(folders("native"), pages=8)) as runtime:
        run(runtime, pinned)
        for number in range(6):
            run(runtime, row(prompt(60, 10 + number)))
        assert run(runtime, row([*SHARED[:64], 5])).cached == {0: 64}
        with pytest.raises(HearthError) as caught:
            runtime.admit([row(prompt(96), cache="pin", max_tokens=1)])
        assert (caught.value.code, caught.value.field) == ("cache_full", "cache")
        assert not runtime.active
        runtime.unpin(7)
        for number in range(6):
            run(runtime, row(prompt(60, 20 + number)))
        assert run(runtime, row([*SHARED[:64], 5])).cached == {}


def bypassing(request: RowRequest) -> RowRequest:
    """The same row without the prefix cache."""
    return row(request.token_ids, cache="bypass", max_tokens=TOKENS)


def test_without_a_cache_nothing_is_pinned(folders: Folders) -> None:
    with closing(LLMInferenceRuntime.open(folders("native"))) as runtime:
        assert runtime.prefix_metrics is None
        assert run(runtime, row(SHARED)).cached == run(runtime, row(SHARED)).cached == {}
        with pytest.raises(HearthError) as caught:
            runtime.admit([row(SHARED, cache="pin")])
        assert (caught.value.code, caught.value.field) == ("unsupported_option", "cache")


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_a_page_that_spoils_a_row_is_forgotten(
    runtime: LLMInferenceRuntime, tokens: int, ahead: int
) -> None:
    wanted = run(runtime, row(SHARED))
    # With a step ahead a row leaves its place before its last token is known.
    runtime._device.steps_ahead = ahead  # type: ignore[misc] # of the CPU's device
    assert runtime._prefix is not None
    (base,) = runtime._prefix._pool._tensors["device"]
    base.array[:, 2] = np.nan
    spoiled = run(runtime, row(SHARED, max_tokens=tokens)).tokens[0]
    assert [token.error for token in spoiled] == ["non_finite"]
    found = run(runtime, row(SHARED))
    assert found.cached == {}
    check_equal(found.tokens[0], wanted.tokens[0], exact=True)


def test_a_load_that_fails_loses_the_rows_and_nothing_else(
    runtime: LLMInferenceRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = run(runtime, row(SHARED))
    with monkeypatch.context() as patch:
        patch.setattr("hearth.runtime.device.cpu.ops.CpuCacheStorage.load", broken)
        runtime.admit([row(SHARED)])
        with pytest.raises(HearthError, match="the copy failed"):
            runtime.step()
    found = run(runtime, row(SHARED))
    assert found.cached == {0: 74}
    check_equal(found.tokens[0], wanted.tokens[0], exact=True)


def test_a_page_that_could_not_be_saved_is_not_there(
    runtime: LLMInferenceRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("hearth.runtime.device.cpu.ops.CpuCacheStorage.save", broken)
        runtime.admit([row(SHARED)])
        assert runtime.step().failure is not None
    found = run(runtime, row(SHARED))
    assert found.cached == {}
    wanted = run(runtime, row(SHARED, cache="bypass"))
    check_equal(found.tokens[0], wanted.tokens[0], exact=True)


def broken(*_: object) -> None:
    raise HearthError("executor_failed", "the copy failed")


def test_of_a_chunk_that_nobody_has_looked_at_no_page_is_kept(
    runtime: LLMInferenceRuntime,
) -> None:
    runtime._device.steps_ahead = 1  # type: ignore[misc] # of the CPU's device
    assert runtime._prefix is not None
    (pool,) = runtime._prefix._pool._tensors["device"]
    number, _ = runtime.admit([row(SHARED), row(prompt(90, 4))])
    runtime.step()
    # A second chunk of both is queued. The numbers of one of them are not finite, which nobody
    # learns as it leaves; the other goes on.
    pool.array[2] = np.nan
    runtime.leave(number)
    while runtime.active:
        runtime.step()
    found = run(runtime, row(SHARED))
    assert found.cached == {0: 32}
    wanted = run(runtime, row(SHARED, cache="bypass"))
    check_equal(found.tokens[0], wanted.tokens[0], exact=True)


TEXT = prompt(75)
REST = len(TEXT) - 1
Open = Callable[..., LLMInferenceRuntime]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("disk") / "qwen3"
    export_model(reference_folder("qwen3"), target, ExportOptions(dialect="native"))
    return target


@pytest.fixture
def opened(folder: Path, tmp_path: Path) -> Open:
    """Opens a runtime with room for pages in memory, and for many on disk."""

    def opened(pages: int = 20) -> LLMInferenceRuntime:
        return open_with_disk(folder, tmp_path / "pages", pages)

    return opened


def open_with_disk(folder: Path, pages_in: Path, pages: int = 20) -> LLMInferenceRuntime:
    return open_pages(folder, pages, prefix_disk_bytes=1 << 22, prefix_folder=str(pages_in))


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.page"))


def reused(runtime: LLMInferenceRuntime) -> int:
    """How much of the text comes from the cache; the reply has to be that without it."""
    found = run(runtime, row(TEXT))
    (wanted,) = run(runtime, row(TEXT, cache="bypass")).tokens.values()
    (tokens,) = found.tokens.values()
    check_equal(tokens, wanted, exact=True)
    return sum(found.cached.values())


def test_what_was_computed_before_a_restart_is_not_computed_again(opened: Open) -> None:
    with closing(opened()) as runtime:
        assert reused(runtime) == 0
    with closing(opened()) as runtime:
        assert runtime.prefix_metrics is not None
        assert runtime.prefix_metrics.bytes["device"] == 0
        assert reused(runtime) == REST
        # They lie in memory now as well.
        assert runtime.prefix_metrics.bytes["device"] == runtime.prefix_metrics.bytes["disk"]
        assert runtime.take_failures() == []


def test_another_salt_finds_nothing_on_disk(opened: Open) -> None:
    with closing(opened()) as runtime:
        run(runtime, row(TEXT, cache_salt="ours"))
    with closing(opened()) as runtime:
        assert run(runtime, row(TEXT, cache_salt="theirs")).cached == {}
        assert run(runtime, row(TEXT)).cached == {}
        assert sum(run(runtime, row(TEXT, cache_salt="ours")).cached.values()) == REST


def test_what_leaves_memory_comes_back_from_the_disk(opened: Open) -> None:
    with closing(opened(pages=4)) as runtime:
        assert reused(runtime) == 0
        for seed in range(1, 4):
            run(runtime, row(prompt(100, seed)))
        metrics = runtime.prefix_metrics
        assert metrics is not None
        assert metrics.bytes["disk"] > metrics.bytes["device"]
        assert reused(runtime) == REST
        assert (metrics.evicted, metrics.damaged) == (0, 0)


@pytest.mark.parametrize(
    ("begin", "data", "words"),
    [
        (HEAD_BYTES + 5, b"damage", "is damaged"),
        (8, b"\1", "is of version 1 and 2 is read here"),
        (0, b"GGUF", "is no page of the prefix cache"),
    ],
)
def test_damaged_files_are_named_and_removed_and_serve_nothing(
    opened: Open, tmp_path: Path, begin: int, data: bytes, words: str
) -> None:
    with closing(opened()) as runtime:
        reused(runtime)
    before = files(tmp_path)
    for path in before:
        held = path.read_bytes()
        path.write_bytes(held[:begin] + data + held[begin + len(data) :])
    with closing(opened()) as runtime:
        assert reused(runtime) == 0
        failures = runtime.take_failures()
        assert failures
        for failure in failures:
            assert (failure.code, words in failure.message) == ("spill_invalid", True)
            assert failure.field in {path.name for path in before}
        assert runtime.take_failures() == []
        assert reused(runtime) == REST


def test_pages_of_another_model_are_not_taken_for_ones_own(opened: Open, tmp_path: Path) -> None:
    """The same prompt has the same file names by another engine, were its folder not another."""
    other = tmp_path / "other"
    options = ExportOptions(dialect="native", quantization="int4")
    export_model(reference_folder("qwen3"), other, options)
    with closing(open_with_disk(other, tmp_path / "pages")) as runtime:
        assert reused(runtime) == 0
    theirs = files(tmp_path)
    with closing(opened()) as runtime:
        assert reused(runtime) == 0
    (own,) = {path.parent for path in files(tmp_path)} - {path.parent for path in theirs}
    for path in files(own):
        path.unlink()
    for path in theirs:
        path.rename(own / path.name)
    with closing(opened()) as runtime:
        assert reused(runtime) == 0
        assert "belongs to another engine" in runtime.take_failures()[0].message


def test_a_folder_that_cannot_be_used_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(HearthError) as caught:
        open_with_disk(folder, tmp_path / "file")
    assert (caught.value.code, caught.value.field) == ("invalid_value", "prefix_folder")


GRID, IMAGE_TOKENS, BEFORE = (1, 5, 8), 40, 12
IMAGE_SHARED = prompt(70)


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
    shape = (3, IMAGE_TOKENS, IMAGE_TEXT["hidden_size"])
    values = np.random.default_rng(seed).normal(0, 0.7, shape).astype(np.float32)
    own = bytes([seed]) * 16 if key is None else key
    return EmbeddedImage(
        STORE.put(values),
        IMAGE_TOKENS,
        (ImageSpan(BEFORE, IMAGE_TOKENS, 0, GRID),),
        own,
    )


def asks(image: EmbeddedImage, *end: int) -> RowRequest:
    """Text, the image, and text again."""
    ids = [*range(20, 20 + BEFORE), *[5] * IMAGE_TOKENS, *range(30, 36), *end]
    return structs.replace(row(ids), images=[image])


def unaided(request: RowRequest) -> RowRequest:
    return structs.replace(request, options=structs.replace(request.options, cache="bypass"))


def test_a_picture_is_part_of_what_prompts_share(seeing: LLMInferenceRuntime) -> None:
    run(seeing, asks(picture(1), 40))
    # It comes again, at another place of the store.
    again = asks(picture(1), 41)
    found = run(seeing, again)
    assert found.cached == {0: BEFORE + IMAGE_TOKENS + 6}
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
            first[name] = run(runtime, row(IMAGE_SHARED, adapter=name))
            assert first[name].cached == {}
        for name in ("other", "", "one"):
            found = run(runtime, row(IMAGE_SHARED, adapter=name))
            assert found.cached == {0: len(IMAGE_SHARED) - 1}
            # The products of an adapter's numbers round a single row differently.
            check_equal(found.tokens[0], first[name].tokens[0], exact=not name)
        # Of what an adapter has left nothing serves another one of its name.
        runtime.unload_adapter("one")
        runtime.load_adapter("one", tmp_path / "other")
        found = run(runtime, row(IMAGE_SHARED, adapter="one"))
        assert found.cached == {0: len(IMAGE_SHARED) - 1}
        check_equal(found.tokens[0], first["other"].tokens[0], exact=False)
