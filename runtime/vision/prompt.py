"""A conversation with pictures as token ids."""

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import NamedTuple

from msgspec import structs

from hearth.runtime.errors import HearthError
from hearth.runtime.image_processing.raw_frames import rate_of
from hearth.runtime.image_processing.sizes import layout_of, video_layout
from hearth.runtime.images import ImageLayout, ImageSpan, Picture
from hearth.runtime.text.conversation import Conversation, Turn, TurnPart
from hearth.runtime.text.tokenizer import EncodedPrompt, Tokenizer
from hearth.runtime.vision_config import VisionConfig

Encode = Callable[[str], list[int]]
# Ids of text around embeddings, and a span without its place.
_Piece = list[int] | ImageSpan
_WORDS = """
zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety
"""
_ONES, _TENS = _WORDS.split()[:20], _WORDS.split()[18:]


def expand(
    ids: Sequence[int],
    layouts: Sequence[ImageLayout],
    config: VisionConfig,
    encode: Encode,
    times: Sequence[Sequence[float]],
) -> tuple[list[int], list[tuple[ImageSpan, ...]]]:
    """The ids of a rendered prompt with its placeholders expanded, and the spans of each layout.

    Layouts come in the order of their placeholders, each with one, but a video of Idefics3 with
    one for each frame that is used (`video_parts`). `times` are the seconds of all frames of a
    video, and empty for a picture. `encode` gives the ids of a piece of text, with special tokens
    recognised and none added. Raises `invalid_value` naming `messages` when placeholders and
    layouts do not match.
    """
    image, video = config.tokens.image, config.tokens.video
    places = [
        (index, video if layout.frames and video >= 0 else image)
        for index, layout in enumerate(layouts)
        for _ in range(_places(layout, config))
    ]
    if [number for number in ids if number in {image, video}] != [number for _, number in places]:
        raise HearthError(
            "invalid_value",
            "the model's chat template has not one place for each image of these messages",
            "messages",
        )
    found: list[int] = []
    spans: list[list[ImageSpan]] = [[] for _ in layouts]
    waiting = iter(places)
    for number in ids:
        if number not in {image, video}:
            found.append(number)
            continue
        index, _ = next(waiting)
        own = spans[index]
        for piece in _pieces(layouts[index], config, encode, times[index]):
            if isinstance(piece, list):
                found += piece
                continue
            first = own[-1].first + own[-1].length if own else 0
            own.append(structs.replace(piece, start=len(found), first=first))
            found += [number] * piece.length
    return found, [tuple(own) for own in spans]


def video_parts(layout: ImageLayout, times: Sequence[float]) -> list[dict[str, str]]:
    """Parts of a message, of type `text` and `image`, for a video of Idefics3.

    Its chat template takes pictures alone, so they replace the video.
    """
    duration = timedelta(seconds=int(len(times) / rate_of(times)))
    text = (
        f"You are provided the following series of {_in_words(len(layout.frames))} frames from a "
        f"{duration} [H:MM:SS] video.\n"
    )
    parts: list[dict[str, str]] = []
    for frame in layout.frames:
        minutes, seconds = divmod(int(times[frame]), 60)
        text += f"\nFrame from {minutes:02d}:{seconds:02d}:"
        parts += [{"type": "text", "text": text}, {"type": "image"}]
        text = ""
    return [*parts, {"type": "text", "text": "\n\n"}]


def _places(layout: ImageLayout, config: VisionConfig) -> int:
    return len(layout.frames) or 1 if config.family == "idefics3" else 1


def _pieces(
    layout: ImageLayout, config: VisionConfig, encode: Encode, times: Sequence[float]
) -> Iterator[_Piece]:
    """Yield the pieces that replace one placeholder."""
    if config.family == "idefics3":
        yield from _tiles(layout, config, encode)
        return
    steps, rows, columns = layout.grid
    grid = steps, rows // config.merge_size, columns // config.merge_size
    if not layout.frames:
        yield ImageSpan(0, layout.tokens, grid=grid)
    elif config.family == "qwen2_5_vl":
        # Seconds from one step in time to the next, at the rate of the frames that are used.
        step_s = config.temporal_patch_size * len(times) / (len(layout.frames) * rate_of(times))
        yield ImageSpan(0, layout.tokens, grid=grid, interval=config.tokens_per_second * step_s)
    else:
        depth, last = config.temporal_patch_size, len(layout.frames) - 1
        for step in range(steps):
            ends = (layout.frames[min(step * depth + k, last)] for k in (0, depth - 1))
            middle = sum(times[frame] for frame in ends) / 2
            yield [*encode(f"<{middle:.1f} seconds>"), config.tokens.vision_start]
            yield ImageSpan(0, layout.tokens // steps, grid=(1, *grid[1:]))
            yield [config.tokens.vision_end]


def _tiles(layout: ImageLayout, config: VisionConfig, encode: Encode) -> Iterator[_Piece]:
    tokens = config.tokens
    span = ImageSpan(0, layout.tokens // layout.segments)
    for row in range(1, layout.rows + 1):
        for column in range(1, layout.columns + 1):
            yield [tokens.fake_around, *encode(f"<row_{row}_col_{column}>")]
            yield span
        # The last row's end and the empty line behind it are read as one piece of text.
        yield encode("\n" if row < layout.rows else "\n\n")
    yield [tokens.fake_around, tokens.global_image]
    yield span
    yield [tokens.fake_around]


def _in_words(number: int) -> str:
    """A number below a thousand as the processor spells it."""
    hundreds, rest = divmod(number, 100)
    tens, ones = divmod(rest, 10)
    words = _ONES[rest] if rest < len(_ONES) else _TENS[tens] + (f"-{_ONES[ones]}" if ones else "")
    if not hundreds:
        return words
    return f"{_ONES[hundreds]} hundred" + (f" and {words}" if rest else "")


class VisionInput(NamedTuple):
    """Picture, or frames of a video with the time of each in seconds, before the layout."""

    pictures: Sequence[Picture]
    times: Sequence[float] = ()

    def layout(self, config: VisionConfig, most_tokens: int = 0) -> ImageLayout:
        """Compute the layout, of `most_tokens` embeddings at the most; raises as `layout_of`."""
        if not self.times:
            return layout_of(self.pictures[0], config, most_tokens)
        return video_layout(self.pictures, self.times, config, most_tokens)


def encode_conversation(
    tokenizer: Tokenizer,
    conversation: Conversation,
    vision_inputs: Sequence[VisionInput],
    layouts: Sequence[ImageLayout],
    config: VisionConfig,
    *,
    most: int | None = None,
) -> tuple[EncodedPrompt, list[tuple[ImageSpan, ...]]]:
    """Token ids of a conversation and the spans of each of its images and videos.

    Parts of kind `image` and `video` are `vision_inputs` with `layouts`, in that order. Raises as
    `Tokenizer.encode_chat` and `expand`.
    """
    if config.family == "idefics3":
        waiting = iter(zip(vision_inputs, layouts, strict=True))
        turns = [_without_videos(turn, waiting) for turn in conversation.turns]
        conversation = structs.replace(conversation, turns=turns)
    times = [one.times for one in vision_inputs]
    chat = tokenizer.encode_chat(conversation, most)
    ids, spans = expand(chat.ids, layouts, config, tokenizer.encode_piece, times)
    return chat._replace(ids=ids), spans


def _without_videos(turn: Turn, waiting: Iterator[tuple[VisionInput, ImageLayout]]) -> Turn:
    """The turn with the pictures of its videos in their place."""
    found: list[TurnPart] = []
    for part in turn.parts:
        if part.kind == "text":
            found.append(part)
            continue
        vision_inputs, layout = next(waiting)
        if part.kind == "image":
            found.append(part)
            continue
        pieces = video_parts(layout, vision_inputs.times)
        found += [
            TurnPart("text", one["text"]) if "text" in one else TurnPart("image") for one in pieces
        ]
    return structs.replace(turn, parts=found)
