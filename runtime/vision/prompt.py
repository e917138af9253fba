"""A conversation with pictures as token ids."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from hearth.runtime.image_processing.placeholders import expand, video_parts
from hearth.runtime.image_processing.sizes import layout_of, video_layout
from hearth.runtime.images import ImageLayout, ImageSpan, Picture
from hearth.runtime.text.tokenizer import Content, Tokenizer
from hearth.runtime.vision_config import VisionConfig

Turn = tuple[str, Content]


class VisionInput(NamedTuple):
    """Picture, or frames of a video with the time of each in seconds, before the layout."""

    pictures: Sequence[Picture]
    times: Sequence[float] = ()

    def layout(self, config: VisionConfig, most_tokens: int = 0) -> ImageLayout:
        """Compute the layout, of `most_tokens` embeddings at the most; raises as `layout_of`."""
        if not self.times:
            return layout_of(self.pictures[0], config, most_tokens)
        return video_layout(self.pictures, self.times, config, most_tokens)


def encode_turns(
    tokenizer: Tokenizer,
    turns: Sequence[Turn],
    vision_inputs: Sequence[VisionInput],
    layouts: Sequence[ImageLayout],
    config: VisionConfig,
) -> tuple[list[int], list[tuple[ImageSpan, ...]]]:
    """Token ids of a conversation and the spans of each of its images and videos.

    Parts of type `image` and `video` are `vision_inputs` with `layouts`, in that order. Raises as
    `Tokenizer.encode_chat` and `expand`.
    """
    if config.family == "idefics3":
        waiting = iter(zip(vision_inputs, layouts, strict=True))
        turns = [(role, _without_videos(content, waiting)) for role, content in turns]
    times = [one.times for one in vision_inputs]
    return expand(tokenizer.encode_chat(turns), layouts, config, tokenizer.encode_piece, times)


def _without_videos(
    content: Content, waiting: Iterator[tuple[VisionInput, ImageLayout]]
) -> Content:
    """The content with the pictures of its videos in their place."""
    if isinstance(content, str):
        return content
    found: list[Mapping[str, str]] = []
    for part in content:
        if part["type"] == "text":
            found.append(part)
            continue
        vision_inputs, layout = next(waiting)
        found += video_parts(layout, vision_inputs.times) if part["type"] == "video" else [part]
    return found
