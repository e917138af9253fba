import pytest
from msgspec import structs

from hearth.runtime.config import RopeConfig
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.simulated_engine import simulated_config
from hearth.runtime.generation.batch_runtime import check_row
from hearth.runtime.images import EmbeddedImage, ImageSpan, Slot
from hearth.runtime.request import RequestOptions, RowRequest

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
