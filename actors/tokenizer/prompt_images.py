from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from hearth.actors.arena import Arena
from hearth.actors.messages import ImageWork, PromptImage, Visual
from hearth.runtime.errors import HearthError
from hearth.runtime.images import DECODING, ImageLayout, ImageSpan
from hearth.runtime.text.conversation import Conversation
from hearth.runtime.text.tokenizer import EncodedPrompt, Tokenizer
from hearth.runtime.vision.prompt import VisionInput, encode_conversation
from hearth.runtime.vision_config import VisionConfig


class MultimodalPrompt(NamedTuple):
    """A conversation as a prompt, and layout and placeholder spans of each of its visuals."""

    encoded: EncodedPrompt
    layouts: list[ImageLayout]
    spans: list[tuple[ImageSpan, ...]]


class PromptImages:
    """Placeholders of visuals in the prompts of one model, computed from their headers alone.

    A picture, or a video, takes `most_tokens` at the most; 0 is the model's own limit.
    """

    def __init__(
        self, config: VisionConfig, tokenizer: Tokenizer, pictures: Arena, most_tokens: int = 0
    ) -> None:
        self.most_tokens = most_tokens
        self._config = config
        self._tokenizer = tokenizer
        self._pictures = pictures
        self._model = hashlib.sha256(msgspec.json.encode((DECODING, config))).digest()

    def encode(
        self, conversation: Conversation, visuals: Sequence[Visual], most: int | None = None
    ) -> MultimodalPrompt:
        """Render and encode a conversation, with its visuals in their order.

        Raises HearthError, with the field `images[k]` where visual k is at fault, and as
        `Tokenizer.encode_chat`.
        """
        kinds = [
            part.kind for turn in conversation.turns for part in turn.parts if part.kind != "text"
        ]
        given = ["video" if visual.times else "image" for visual in visuals if visual.frames]
        if kinds != given or len(given) < len(visuals):
            text = f"the messages have not a place for each of the {len(visuals)} images"
            raise HearthError("invalid_value", text, "messages")
        vision_inputs = [
            VisionInput([one.picture for one in visual.frames], visual.times) for visual in visuals
        ]
        layouts = [self._layout(number, one) for number, one in enumerate(vision_inputs)]
        encoded, spans = encode_conversation(
            self._tokenizer, conversation, vision_inputs, layouts, self._config, most=most
        )
        return MultimodalPrompt(encoded, layouts, spans)

    def works(self, prompt: MultimodalPrompt, visuals: Sequence[Visual]) -> list[PromptImage]:
        """The visuals with their keys, which are digests of all of their bytes.

        Raises `internal` if a slot of theirs has been reused.
        """
        return [
            PromptImage(ImageWork(self._key(visual, layout), visual, layout), spans)
            for visual, layout, spans in zip(visuals, prompt.layouts, prompt.spans, strict=True)
        ]

    def _layout(self, number: int, vision_inputs: VisionInput) -> ImageLayout:
        try:
            return vision_inputs.layout(self._config, self.most_tokens)
        except HearthError as error:
            raise HearthError(error.code, error.message, f"images[{number}]") from error

    def _key(self, visual: Visual, layout: ImageLayout) -> bytes:
        pictures = [frame.picture for frame in visual.frames]
        digest = hashlib.sha256(self._model + msgspec.msgpack.encode((pictures, layout)))
        for frame in visual.frames:
            with self._pictures.view(frame.slot) as data:
                # Of a fixed length: where a frame ends is part of what the key says.
                digest.update(hashlib.sha256(data).digest())
            self._pictures.check(frame.slot)
        return digest.digest()
