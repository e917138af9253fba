import numpy as np
import pytest

from hearth.runtime.errors import HearthError
from hearth.runtime.image_processing.local_embeddings import LocalEmbeddings
from hearth.runtime.images import EmbeddedImage


def test_what_is_kept_is_what_was_put() -> None:
    store = LocalEmbeddings()
    first, second = np.zeros((2, 2, 3)), np.ones((2, 3, 3))
    slots = store.put(first), store.put(second)
    assert store.read(EmbeddedImage(slots[1], 3, ())) is second
    assert store.read(EmbeddedImage(slots[0], 2, ())) is first
    with pytest.raises(HearthError):
        store.read(EmbeddedImage(slots[0], 3, ()))
    store.drop(slots[0])
    store.drop(slots[0])
    with pytest.raises(HearthError):
        store.read(EmbeddedImage(slots[0], 2, ()))
