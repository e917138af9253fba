from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.arena import Arena
from runtime.config import LLMEngineRunnerConfig
from runtime.errors import HearthError
from runtime.images import EmbeddedImage
from runtime.tensors.dtypes import numpy_dtype


class ArenaEmbeddings:
    """Embeddings of images that others write into an arena, for the runtime of one engine."""

    def __init__(self, arena: Arena, config: LLMEngineRunnerConfig) -> None:
        self._arena = arena
        self._dtype = numpy_dtype(config.dtype)
        self._features, self._width = 1 + config.num_deepstack_features, config.hidden_size

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's embeddings, deepstack features included."""
        return self._features * self._width * self._dtype.itemsize

    def read(self, image: EmbeddedImage) -> NDArray[Any]:
        """A view; raises `internal` for a slot that is not its image's, or not any more."""
        data = np.frombuffer(self._arena.view(image.slot), np.uint8)
        if data.nbytes != image.tokens * self.token_bytes:
            raise HearthError("internal", "the embeddings of an image have another size", "images")
        return data.view(self._dtype).reshape(self._features, image.tokens, self._width)
