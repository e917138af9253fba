"""A conversation with pictures as token ids."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec import structs

from hearth.runtime.image_processing.placeholders import expand, video_parts
from hearth.runtime.image_processing.sizes import layout_of, video_layout
from hearth.runtime.images import ImageLayout, ImageSpan, Picture
from hearth.runtime.text.conversation import Conversation, Turn, TurnPart
from hearth.runtime.text.tokenizer import EncodedChat, Tokenizer
from hearth.runtime.vision_config import VisionConfig


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
) -> tuple[EncodedChat, list[tuple[ImageSpan, ...]]]:
    """Token ids of a conversation and the spans of each of its images and videos.

    Parts of kind `image` and `video` are `vision_inputs` with `layouts`, in that order. Raises as
    `Tokenizer.encode_chat` and `expand`.
    """
    if config.family == "idefics3":
        waiting = iter(zip(vision_inputs, layouts, strict=True))
        turns = [_without_videos(turn, waiting) for turn in conversation.turns]
        conversation = structs.replace(conversation, turns=turns)
    times = [one.times for one in vision_inputs]
    chat = tokenizer.encode_chat(conversation)
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
