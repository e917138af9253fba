"""Shared memory that a vision encoder reads and writes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hearth.actors.arena import Arena
from hearth.runtime.images import ImageLayout, Slot
from hearth.runtime.tensors.tensor import numpy_dtype
from hearth.runtime.vision_config import VisionConfig


class VisionEncoderMemory(NamedTuple):
    """The arenas of a vision encoder, and its configuration, which gives the shapes of slots."""

    config: VisionConfig
    patches: Arena
    embeddings: Arena

    def arrays(
        self, layout: ImageLayout, patches: Slot, target: Slot
    ) -> tuple[NDArray[np.uint8], NDArray[Any]]:
        """Arrays of a picture: patches [patches, patch_bytes], and the target of its embeddings.

        The target is [1 + deepstack features, tokens, output_size] in the decoder's type. Raises
        `internal` for a slot that has been reused, or is of another size.
        """
        config = self.config
        given = self.patches.array(
            patches, (layout.patches, config.patch_bytes), np.dtype(np.uint8)
        )
        outputs = (1 + config.num_deepstack_features, layout.tokens, config.output_size)
        return given, self.embeddings.array(target, outputs, numpy_dtype(config.embedding_dtype))

    def check(self, patches: Slot, target: Slot) -> None:
        """Raise `internal` if one of the two slots has been reused."""
        self.patches.check(patches)
        self.embeddings.check(target)
