"""Memory for pictures, of a daemon whose model sees, and its tower's configuration."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from hearth.actors.arena import Arena, slot_bytes
from hearth.actors.scheduler.encoder_scheduler import IN_FLIGHT, ImageArenas
from hearth.actors.tokenizer.prompt_images import PromptImages
from hearth.daemon.configuration.settings import Settings
from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.tensors.tensor import numpy_dtype
from hearth.runtime.text.tokenizer import Tokenizer
from hearth.runtime.vision_config import VisionConfig, load_vision_config


class VisionMemory(NamedTuple):
    """Shared memory of front door, encoder and executor, and the tower that fills it.

    A picture becomes `image_tokens` at most until an executor has reported what fits.
    """

    config: VisionConfig
    pictures: Arena
    patches: Arena
    embeddings: Arena
    token_bytes: int
    image_tokens: int

    @property
    def descriptors(self) -> tuple[int, ...]:
        """File descriptors that the processes of encoder and executor inherit."""
        return self.pictures.descriptor, self.patches.descriptor, self.embeddings.descriptor

    @property
    def facts(self) -> dict[str, str | int | float]:
        """Facts of the tower for clients."""
        tower = self.config
        return {"vision": f"{tower.family}, {tower.num_layers} layers, {tower.dtype}"}

    def arenas(self) -> ImageArenas:
        """Arenas whose slots the scheduler allocates."""
        return ImageArenas(
            patches=self.patches.slots(),
            embeddings=self.embeddings.slots(),
            patch_bytes=self.config.patch_bytes,
            token_bytes=self.token_bytes,
        )

    def prompt_images(self, tokenizer: Tokenizer) -> PromptImages:
        """Layouts of pictures in prompts, for the tokenizer."""
        return PromptImages(self.config, tokenizer, self.pictures, self.image_tokens)


def open_vision_memory(
    settings: Settings, engine: Path, config: LLMEngineRunnerConfig, opened: ExitStack
) -> VisionMemory | None:
    """Open the memory, released at the end of `opened`; None for a model of text alone.

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
    """Most tokens of one picture or video."""
    longest = min(config.max_supported_input_length, config.max_kv_cache_capacity - 1)
    most = max(1, min(longest, settings.scheduler.queue_tokens) // 2)
    return settings.door.image_tokens or most


def _patches_size(vision: VisionConfig, tokens: int) -> int:
    """Bytes of the patches of the largest video, or of the largest concurrent calls of a tower."""
    largest = max(tokens * vision.merge_size**2, IN_FLIGHT * vision.max_patches)
    return slot_bytes(largest * vision.patch_bytes)
