"""What a vision tower reads and writes of the memory that processes share."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hearth.actors.arena import Arena
from hearth.runtime.images import ImageLayout, Slot
from hearth.runtime.tensors.tensor import numpy_dtype
from hearth.runtime.vision_config import VisionConfig


class VisionEncoderMemory(NamedTuple):
    """The arenas of a tower, and its configuration, which says what lies in their slots."""

    config: VisionConfig
    patches: Arena
    embeddings: Arena

    def arrays(
        self, layout: ImageLayout, patches: Slot, target: Slot
    ) -> tuple[NDArray[np.uint8], NDArray[Any]]:
        """A picture's patches [patches, patch_bytes], and where its embeddings go.

        These are [1 + deepstack features, tokens, output_size] in the decoder's type. Raises
        `internal` for a slot that is another's, or of another size.
        """
        config = self.config
        given = self.patches.array(
            patches, (layout.patches, config.patch_bytes), np.dtype(np.uint8)
        )
        outputs = (1 + config.num_deepstack_features, layout.tokens, config.output_size)
        return given, self.embeddings.array(target, outputs, numpy_dtype(config.embedding_dtype))

    def check(self, patches: Slot, target: Slot) -> None:
        """Raise `internal` unless both have been the same all the time."""
        self.patches.check(patches)
        self.embeddings.check(target)
