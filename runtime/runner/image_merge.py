import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from hearth.runtime.device.device import Device
from hearth.runtime.images import EmbeddedImage, EmbeddingStore
from hearth.runtime.tensors.tensor import Tensor


class MultimodalMetrics(msgspec.Struct):
    """Counters of images since the start.

    `images` and `tokens` were merged into prompts, again for a row that was preempted;
    `merge_seconds` is the time that queueing took. `encoded` images went through a tower of this
    runtime.
    """

    images: int = 0
    tokens: int = 0
    merge_seconds: float = 0.0
    encoded: int = 0
    encode_seconds: float = 0.0


class ImagePiece(NamedTuple):
    """Embeddings `first` to `first + tokens - 1` of an image, for the places from `place` on.

    Places count the tokens of a step, all rows with their padding.
    """

    place: int
    image: EmbeddedImage
    first: int
    tokens: int


def image_pieces(
    rows: Sequence[Sequence[EmbeddedImage]],
    begins: Sequence[int],
    counts: Sequence[int],
    width: int,
) -> list[ImagePiece]:
    """Cut each row's images to its tokens `begins` to `begins + counts - 1`."""
    pieces = []
    for row, (images, begin, count) in enumerate(zip(rows, begins, counts, strict=True)):
        for image in images:
            for span in image.spans:
                start = max(begin, span.start)
                fallen = min(begin + count, span.start + span.length) - start
                if fallen > 0:
                    place = row * width + start - begin
                    pieces.append(ImagePiece(place, image, span.first + start - span.start, fallen))
    return pieces


class ImageMerge:
    """Merge of image embeddings into the inputs of prompt chunks, in place of placeholder tokens.

    Deepstack features go into buffers of their own, which hold zeros for all other tokens.
    """

    def __init__(
        self, store: EmbeddingStore, device: Device, embeds: Tensor, deepstack: Sequence[Tensor]
    ) -> None:
        self._store, self._ops = store, device.image_ops
        self._embeds, self._deepstack = embeds, deepstack
        self.metrics = MultimodalMetrics()
        self._dirty = 0

    def merge(self, pieces: Sequence[ImagePiece]) -> None:
        """Merge into the chunk whose tokens have just been embedded.

        Raises `internal` if embeddings are gone or do not fit.
        """
        if self._dirty:
            for features in self._deepstack:
                self._ops.clear(features, self._dirty)
        self._dirty = max((piece.place + piece.tokens for piece in pieces), default=0)
        if not pieces:
            return
        began = time.monotonic()
        for place, image, first, tokens in pieces:
            found = self._store.read(image)
            for target, rows in zip((self._embeds, *self._deepstack), found, strict=False):
                self._ops.splice(target, place, rows[first : first + tokens])
            # The embeddings read are the right ones only if they still lie there.
            self._store.read(image)
            self.metrics.images += first == 0
            self.metrics.tokens += tokens
        self.metrics.merge_seconds += time.monotonic() - began
