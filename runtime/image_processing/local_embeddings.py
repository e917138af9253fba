from typing import Any

from numpy.typing import NDArray

from hearth.runtime.errors import HearthError
from hearth.runtime.images import EmbeddedImage, Slot


class LocalEmbeddings:
    """Embeddings of images that are kept in the process of their runtime."""

    def __init__(self) -> None:
        self._kept: dict[Slot, NDArray[Any]] = {}
        self._made = 0

    def put(self, array: NDArray[Any]) -> Slot:
        """Keep [1 + deepstack features, tokens, H], in the engine's type, until it is dropped."""
        self._made += 1
        slot = Slot(0, array.nbytes, self._made)
        self._kept[slot] = array
        return slot

    def drop(self, slot: Slot) -> None:
        """Forget what was put there; a slot that is not kept is ignored."""
        self._kept.pop(slot, None)

    def read(self, image: EmbeddedImage) -> NDArray[Any]:
        """The array itself; raises `internal` where it is not kept or has other tokens."""
        array = self._kept.get(image.slot)
        if array is None or array.shape[1:2] != (image.tokens,):
            raise HearthError("internal", "the embeddings of an image are not there", "images")
        return array
