"""Whole generations with images by real engines, against the specification; their limits."""

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from msgspec import structs

from hearth.runtime.config import RopeConfig, load_config
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.simulated_engine import simulated_config
from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.generation.batch_runtime import check_row
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.images import EmbeddedImage, ImageSpan, Slot
from hearth.runtime.known_answer import load_answer
from hearth.runtime.options import RuntimeOptions, SpeculationOptions
from hearth.runtime.request import RequestOptions, RowRequest, RowToken
from hearth.runtime.speculation.eagle import EagleProposer
from tests.runtime.export.trees import export_with_draft
from tests.runtime.generation.image_models import STORE, arriving, check_text, image_rows
from tests.vision_models import FAMILIES, Family, write_vision_model

Method = Literal["off", "lookup", "eagle"]
Folders = Callable[..., tuple[Path, Path]]
CHUNK, ROWS = 7, 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Gives model and engine folder of a family, made once; with a draft where one is asked for."""

    @cache
    def made(family: Family, dialect: str = "classic", *, draft: bool = False) -> tuple[Path, Path]:
        place = tmp_path_factory.mktemp(f"{family}-{dialect}")
        source = write_vision_model(place / "model", family)
        options: dict[str, Any] = {
            "dialect": dialect,
            "prefill_chunk": CHUNK,
            "max_batch": ROWS,
            "capacity": 256,
        }
        if draft:
            return source, export_with_draft(source, place, **options)
        export_model(source, place / "engine", ExportOptions(**options))
        return source, place / "engine"

    return made


def opened(folder: Path, method: Method = "off") -> LLMInferenceRuntime:
    speculation = SpeculationOptions(method=method, adaptive=False)
    options = RuntimeOptions(threads=1, speculation=speculation)
    return LLMInferenceRuntime.open(folder, options, embeddings=STORE)


@pytest.mark.parametrize("family", FAMILIES)
def test_text_behind_images_is_that_of_the_specification(
    folders: Folders, dialect: str, family: Family
) -> None:
    models = folders(family, dialect)
    rows = image_rows(family)
    with closing(opened(models[1])) as runtime:
        for apart in (0, 4):
            for row, tokens in zip(rows, arriving(runtime, rows, apart), strict=True):
                assert len(tokens) == row.options.max_tokens
                check_text(models, row, tokens)
        metrics, images = (
            runtime.get_multimodal_metrics(),
            [one for row in rows for one in row.images],
        )
        merged = 2 * len(images), 2 * sum(image.tokens for image in images)
        assert (metrics.images, metrics.tokens) == merged
        assert metrics.merge_seconds > 0


def test_embeddings_may_be_of_16_bits(tmp_path: Path) -> None:
    models = write_vision_model(tmp_path / "model", "qwen3_vl"), tmp_path / "engine"
    export_model(*models, ExportOptions(dtype="float16", dialect="classic", prefill_chunk=CHUNK))
    rows = image_rows("qwen3_vl", "float16")
    with closing(opened(models[1])) as runtime:
        for row, tokens in zip(rows, arriving(runtime, rows, 1), strict=True):
            check_text(models, row, tokens, tolerance=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lookup", "eagle"])
@pytest.mark.parametrize("family", FAMILIES)
def test_speculation_leaves_it_as_it_is(folders: Folders, family: Family, method: Method) -> None:
    models = folders(family, draft=True)
    rows = image_rows(family)
    # What a lookup finds are tokens that are said again and again.
    rows.append(structs.replace(rows[2], options=structs.replace(
        rows[2].options, max_tokens=20, logit_bias=((30, 100.0),))))  # fmt: skip
    with closing(opened(models[1], method)) as runtime:
        runtime.capture([1, 2, 3])
        for row, tokens in zip(rows, arriving(runtime, rows, 3), strict=True):
            check_text(models, row, tokens, free=not row.options.logit_bias)
        assert runtime.speculation_metrics.rounds > 0
        assert runtime.speculation_metrics.accepted > 0


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_rows_that_were_put_back_go_on_with_their_images(folders: Folders, family: Family) -> None:
    models = folders(family)
    rows = image_rows(family)[2:5]
    with closing(opened(models[1])) as runtime:
        before: list[list[RowToken]] = [[] for _ in rows]
        numbers = runtime.admit(rows)
        while min(map(len, before)) < 3:
            for token in runtime.step().tokens:
                before[token.row].append(token)
        again = []
        for row, number in zip(rows, numbers, strict=True):
            generated = runtime.release(number)
            assert generated is not None
            again.append(structs.replace(row, token_ids=row.token_ids + generated))
        after = arriving(runtime, again, 2)
        for row, first, rest in zip(rows, before, after, strict=True):
            assert len(first) + len(rest) == row.options.max_tokens
            check_text(models, row, [*first, *rest])


def test_an_image_token_that_the_model_says_is_text(folders: Folders) -> None:
    models = folders("qwen3_vl")
    with closing(opened(models[1])) as runtime:
        image_id = runtime.config.image_token_id
        row = image_rows("qwen3_vl")[0]
        forced = structs.replace(row.options, logit_bias=((image_id, 100.0),), max_tokens=4)
        (said,) = arriving(runtime, [structs.replace(row, options=forced)], 0)
        assert [token.token_id for token in said] == [image_id] * 4
        check_text(models, row, said, free=False)
        grown = structs.replace(row, token_ids=row.token_ids + [image_id] * 4)
        (rest,) = arriving(runtime, [grown], 0)
        check_text(models, row, [*said, *rest], free=False)
        # In a prompt too: what no span names is text, whatever its id.
        plain = structs.replace(row, images=[])
        check_text(models, plain, arriving(runtime, [plain], 0)[0])


def test_ids_in_the_place_of_images_count_for_nothing(folders: Folders) -> None:
    models = folders("qwen2_5_vl")
    row = image_rows("qwen2_5_vl")[2]
    other = list(row.token_ids)
    for image in row.images:
        for span in image.spans:
            other[span.start : span.start + span.length] = [77] * span.length
    with closing(opened(models[1])) as runtime:
        found = [
            arriving(runtime, [structs.replace(row, token_ids=ids)], 0)[0]
            for ids in (row.token_ids, other)
        ]
        assert found[0] == found[1]


def test_embeddings_that_are_gone_end_their_row_alone(folders: Folders) -> None:
    models = folders("qwen3_vl")
    kept, text = image_rows("qwen3_vl")[:2]
    gone = EmbeddedImage(Slot(0, 1, 10**9), 6, (ImageSpan(2, 6, 0, (1, 2, 3)),))
    with closing(opened(models[1])) as runtime:
        runtime.admit([text])
        tokens = list(runtime.step().tokens)
        (number,) = runtime.admit([structs.replace(kept, images=[gone])])
        errors = []
        failures: list[HearthError] = []
        while runtime.active:
            result = runtime.step()
            failures += [result.failure] if result.failure else []
            errors += [token.error for token in result.tokens if token.row == number]
            tokens += [token for token in result.tokens if token.row == 0]
        assert errors == ["internal"]
        assert [failure.field for failure in failures] == ["images"]
        check_text(models, text, tokens)
        # What it left in the buffers of the step goes nowhere.
        check_text(models, kept, arriving(runtime, [kept], 0)[0])


def test_a_known_answer_is_right_before_and_behind_images(folders: Folders) -> None:
    models = folders("qwen3_vl")
    answer = load_answer(models[1], load_config(models[1]))
    assert answer is not None
    with closing(opened(models[1])) as runtime:
        runtime.check_answer(answer)
        rows = image_rows("qwen3_vl")[:ROWS]
        runtime.admit(rows)
        runtime.step()
        for number in range(ROWS):
            runtime.leave(number)
        assert runtime.check_answer(answer).compared > 0
        check_text(models, rows[0], arriving(runtime, rows[:1], 0)[0])


@pytest.fixture
def drafted(folders: Folders) -> Iterator[LLMInferenceRuntime]:
    models = folders("qwen3_vl", draft=True)
    with closing(opened(models[1], "eagle")) as runtime:
        yield runtime


def test_a_draft_reads_the_embeddings_of_the_tokens_behind_its_entries(
    drafted: LLMInferenceRuntime,
) -> None:
    assert drafted._speculation is not None
    proposer = drafted._speculation.proposer
    assert isinstance(proposer, EagleProposer)
    draft, table = proposer._draft, drafted._runner._resources.embedding.array
    row = image_rows("qwen3_vl")[2]
    merged = table[row.token_ids].astype(np.float32)
    for image in row.images:
        for span in image.spans:
            merged[span.start : span.start + span.length] = STORE.read(image)[0]
    read: list[np.ndarray] = []
    keep = draft._steps.keep

    def note(rows: int, tokens: int, first: int | None = None) -> None:
        if first is not None:
            shape = (rows, tokens, merged.shape[1])
            added = min(tokens, len(merged) - 1 - sum(map(len, read)))
            read.append(draft._prompt.inputs.inputs_embeds.view(shape)[0, :added].copy())
        keep(rows, tokens, first)

    draft._steps.keep = note  # type: ignore[method-assign] # of this one
    drafted.admit([row])
    while drafted.active and not drafted._context.decoding:
        drafted.step()
    assert len(read) > 2
    np.testing.assert_array_equal(np.concatenate(read), merged[1:])


TEXT = simulated_config(capacity=64)
SEES = structs.replace(
    TEXT,
    image_token_id=5,
    use_context_dependent_rope=True,
    rope_config=RopeConfig(type="mrope", mrope_section=(1, 0, 0)),
)


def row(*images: tuple[ImageSpan, ...], prompt: int = 20, held: int = 0) -> RowRequest:
    """A row whose images have ten embeddings each."""
    return RowRequest(
        token_ids=[1] * (prompt + held),
        prompt_length=prompt,
        options=RequestOptions(max_tokens=held + 4),
        images=[EmbeddedImage(Slot(0, 10, 1), 10, spans) for spans in images],
    )


@pytest.mark.parametrize(
    "images",
    [
        [(ImageSpan(0, 10),)],
        [(ImageSpan(10, 10, 0, (1, 2, 5)),)],
        [(ImageSpan(0, 4), ImageSpan(4, 6, 4)), (ImageSpan(12, 6, 0, (2, 1, 3), 2.5),)],
    ],
)
@pytest.mark.parametrize("held", [0, 3])
def test_images_in_order_in_the_prompt_are_taken(
    images: list[tuple[ImageSpan, ...]], held: int
) -> None:
    check_row(SEES, row(*images, held=held), 64)


@pytest.mark.parametrize(
    "images",
    [
        [(ImageSpan(11, 10),)],
        [(ImageSpan(-1, 4),)],
        [(ImageSpan(3, 0),)],
        [(ImageSpan(3, -2),)],
        [(ImageSpan(4, 4), ImageSpan(2, 2, 4))],
        [(ImageSpan(4, 4), ImageSpan(7, 2, 4))],
        [(ImageSpan(0, 5, 6),)],
        [(ImageSpan(0, 5, -1),)],
        [(ImageSpan(0, 10, 0, (1, 2, 4)),)],
        [(ImageSpan(0, 10, 0, (1, -2, -5)),)],
        [(ImageSpan(0, 10, 0, (0, 2, 5)),)],
        [(ImageSpan(0, 10, 0, (1, 2, 5), -1.0),)],
        [(ImageSpan(0, 10, 0, (1, 2, 5), float("nan")),)],
        [(ImageSpan(0, 10, 0, (1, 2, 5), float("inf")),)],
    ],
)
def test_images_at_other_places_are_refused(images: list[tuple[ImageSpan, ...]]) -> None:
    with pytest.raises(HearthError) as caught:
        check_row(SEES, row(*images), 64)
    assert (caught.value.code, caught.value.field) == ("invalid_value", "images[0]")


def test_the_second_image_is_named_where_it_overlaps_the_first() -> None:
    with pytest.raises(HearthError) as caught:
        check_row(SEES, row((ImageSpan(0, 10),), (ImageSpan(9, 5),)), 64)
    assert caught.value.field == "images[1]"


def test_a_model_of_text_takes_no_images() -> None:
    with pytest.raises(HearthError) as caught:
        check_row(TEXT, row((ImageSpan(0, 10),)), 64)
    assert (caught.value.code, caught.value.field) == ("unsupported_option", "images")


def test_a_video_that_counts_beyond_the_positions_of_an_engine_is_refused() -> None:
    # The last of five steps of fifteen positions stands at 2 + 60.
    video = (ImageSpan(2, 5, 0, (5, 1, 1), 15.0),)
    check_row(SEES, row(video), 64)
    longer = (ImageSpan(2, 5, 0, (5, 1, 1), 16.0),)
    with pytest.raises(HearthError, match="fewer frames") as caught:
        check_row(SEES, row((ImageSpan(0, 1, 0, (1, 1, 1)),), longer), 64)
    assert (caught.value.code, caught.value.field) == ("capacity_exceeded", "images[1]")
    check_row(structs.replace(SEES, use_context_dependent_rope=False), row(longer), 64)


@pytest.mark.parametrize("interval", [100.0, 1e9, 1e300])
def test_frames_that_are_far_apart_are_refused_for_that_alone(interval: float) -> None:
    with pytest.raises(HearthError, match="fewer frames") as caught:
        check_row(SEES, row((ImageSpan(2, 6, 0, (3, 2, 1), interval),)), 64)
    assert caught.value.code == "capacity_exceeded"
    # Of one step it does not matter how far the next would be.
    check_row(SEES, row((ImageSpan(2, 6, 0, (1, 3, 2), interval),)), 64)
