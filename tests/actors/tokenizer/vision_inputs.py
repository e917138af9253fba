"""The tokenizer of a vision-language model, and pictures on their way to it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import structs

from hearth.actors.arena import Arena
from hearth.actors.messages import ImageInput, Visual
from hearth.actors.tokenizer.prompt_images import MultimodalPrompt, PromptImages
from hearth.runtime.engine_folder import write_config
from hearth.runtime.images import Picture
from hearth.runtime.text.conversation import Conversation, Role, Turn, TurnPart
from hearth.runtime.text.tokenizer import Tokenizer
from hearth.runtime.vision_config import VisionConfig
from tests.runtime.image_processing.photographs import config_like
from tests.runtime.text.folders import make_config, write_folder
from tests.vision_models import VOCABULARY, Family, make_tokenizer
from tests.vision_processors import TEMPLATES

RULES: dict[str, dict[str, Any]] = {
    "idefics3": {"tile_size": 56, "longest_edge": 112},
    "qwen3_vl": {"min_pixels": 1, "video_min_pixels": 1},
    "qwen2_5_vl": {"min_pixels": 1, "video_min_pixels": 1},
}
IMAGE = TurnPart("image")


class VisionInputs:
    """What a tokenizer needs to see, and `send`, which puts a picture into its arena."""

    def __init__(
        self,
        folder: Path,
        family: Family = "qwen3_vl",
        most_tokens: int = 0,
        *,
        room: int = 1 << 20,
    ) -> None:
        self.config: VisionConfig = config_like(family, **RULES[family])
        write_folder(folder, make_tokenizer(family), TEMPLATES[family], vocab_size=VOCABULARY)
        sees = structs.replace(make_config(VOCABULARY), image_token_id=self.config.tokens.image)
        write_config(folder, sees)
        self.tokenizer = Tokenizer.open(folder)
        self.arena = Arena.create("pictures", room)
        self.slots = self.arena.slots()
        self.images = PromptImages(self.config, self.tokenizer, self.arena, most_tokens)

    def encode(self, turns: Sequence[Turn], visuals: Sequence[Visual]) -> MultimodalPrompt:
        return self.images.encode(Conversation([*turns]), visuals)

    def send(self, data: bytes = b"pixels", width: int = 64, height: int = 64) -> Visual:
        slot = self.slots.take(len(data))
        assert slot is not None
        self.arena.view(slot)[:] = data
        return Visual([ImageInput(Picture("jpeg", width, height), slot)])

    def video(self, *times: float, data: Sequence[bytes] = ()) -> Visual:
        each = data or [b"pixels"] * len(times)
        frames = [frame for one in each for frame in self.send(one).frames]
        return Visual(frames, list(times))


def turn(*parts: str | TurnPart, role: Role = "user") -> Turn:
    found = [part if isinstance(part, TurnPart) else TurnPart("text", part) for part in parts]
    return Turn(role, "", found)
