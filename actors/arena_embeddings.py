from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from hearth.actors.arena import Arena
from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.images import EmbeddedImage
from hearth.runtime.tensors.tensor import numpy_dtype


class ArenaEmbeddings:
    """Embeddings of images that others write into an arena, for the runtime of one engine."""

    def __init__(self, arena: Arena, config: LLMEngineRunnerConfig) -> None:
        self._arena = arena
        self._dtype = numpy_dtype(config.dtype)
        self._features, self._width = 1 + config.num_deepstack_features, config.hidden_size

    def read(self, image: EmbeddedImage) -> NDArray[Any]:
        """A view; raises `internal` for a slot that is not its image's, or not any more."""
        shape = (self._features, image.tokens, self._width)
        return self._arena.array(image.slot, shape, self._dtype)
