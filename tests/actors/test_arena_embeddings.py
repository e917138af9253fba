from __future__ import annotations

import numpy as np
import pytest
from msgspec import structs

from hearth.actors.arena import Arena
from hearth.actors.executor.open import ArenaEmbeddings
from hearth.runtime.config import DType
from hearth.runtime.errors import HearthError
from hearth.runtime.images import EmbeddedImage
from hearth.runtime.tensors.tensor import numpy_dtype
from tests.runtime.engine_configs import small_config

TOKENS = 3


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_embeddings_are_read_where_they_lie_in_the_engines_type(dtype: DType) -> None:
    config = structs.replace(small_config(), dtype=dtype, num_deepstack_features=2)
    arena = Arena.create("embeddings", 1 << 16)
    store, slots = ArenaEmbeddings(arena, config), arena.slots()
    shape = (3, TOKENS, config.hidden_size)
    written = np.arange(np.prod(shape)).reshape(shape).astype(numpy_dtype(dtype))
    slot = slots.take(written.nbytes)
    assert slot is not None
    arena.view(slot)[:] = written.tobytes()
    image = EmbeddedImage(slot, TOKENS, ())
    read = store.read(image)
    assert read.dtype == written.dtype
    assert np.array_equal(read, written)
    arena.view(slot)[0] ^= 1
    assert not np.array_equal(read, written), "it is a view"
    with pytest.raises(HearthError, match="bytes"):
        store.read(structs.replace(image, tokens=TOKENS + 1))
    slots.free(slot)
    with pytest.raises(HearthError) as caught:
        store.read(image)
    assert caught.value.code == "internal"
