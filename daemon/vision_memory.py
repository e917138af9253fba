"""What a daemon has whose model sees: the tower's configuration, and the memory of pictures."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from hearth.actors.arena import Arena, slot_bytes
from hearth.actors.scheduler.encodings import IN_FLIGHT, ImageArenas
from hearth.actors.tokenizer.prompt_images import PromptImages
from hearth.daemon.configuration.settings import Settings
from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.tensors.tensor import numpy_dtype
from hearth.runtime.text import Tokenizer
from hearth.runtime.vision_config import VisionConfig, load_vision_config


class VisionMemory(NamedTuple):
    """The memory that front door, encoder and executor share, and how a tower fills it.

    A picture becomes `image_tokens` at the most until an executor has told what fits.
    """

    config: VisionConfig
    pictures: Arena
    patches: Arena
    embeddings: Arena
    token_bytes: int
    image_tokens: int

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What the processes of encoder and executor inherit."""
        return self.pictures.descriptor, self.patches.descriptor, self.embeddings.descriptor

    @property
    def facts(self) -> dict[str, str | int | float]:
        """What clients are told of the tower."""
        tower = self.config
        return {"vision": f"{tower.family}, {tower.num_layers} layers, {tower.dtype}"}

    def arenas(self) -> ImageArenas:
        """What the scheduler gives out."""
        return ImageArenas(
            patches=self.patches.slots(),
            embeddings=self.embeddings.slots(),
            patch_bytes=self.config.patch_bytes,
            token_bytes=self.token_bytes,
        )

    def prompt_images(self, tokenizer: Tokenizer) -> PromptImages:
        """What the tokenizer knows of pictures."""
        return PromptImages(self.config, tokenizer, self.pictures, self.image_tokens)


def open_vision_memory(
    settings: Settings, engine: Path, config: LLMEngineRunnerConfig, opened: ExitStack
) -> VisionMemory | None:
    """None for a model of text alone; its memory is given back at the end of `opened`.

    Raises `engine_*` for a tower's configuration that cannot be read, and `out_of_memory`.
    """
    vision = load_vision_config(engine)
    if vision is None:
        return None

    def arena(name: str, size: int) -> Arena:
        made = Arena.create(name, size)
        opened.callback(made.close)
        return made

    features = 1 + config.num_deepstack_features
    token_bytes = features * config.hidden_size * numpy_dtype(config.dtype).itemsize
    image_tokens = most_tokens(settings, config)
    return VisionMemory(
        config=vision,
        pictures=arena("pictures", settings.door.images_in_flight_bytes),
        patches=arena("patches", _patches_size(vision, image_tokens)),
        embeddings=arena("embeddings", settings.encoder.image_cache_bytes),
        token_bytes=token_bytes,
        image_tokens=image_tokens,
    )


def most_tokens(settings: Settings, config: LLMEngineRunnerConfig) -> int:
    """How many tokens one picture, or video, becomes at the most."""
    longest = min(config.max_supported_input_length, config.max_kv_cache_capacity - 1)
    most = max(1, min(longest, settings.scheduler.queue_tokens) // 2)
    return settings.door.image_tokens or most


def _patches_size(vision: VisionConfig, tokens: int) -> int:
    """Room for the largest video, or for the largest calls of a tower that are under way."""
    largest = max(tokens * vision.merge_size**2, IN_FLIGHT * vision.max_patches)
    return slot_bytes(largest * vision.patch_bytes)
