from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hearth.runtime.device.cpu.cpu_device import CpuDevice
from hearth.runtime.errors import HearthError
from hearth.runtime.images import EmbeddedImage, ImageSpan, Slot
from hearth.runtime.runner.image_merge import ImageMerge, ImagePiece, image_pieces
from hearth.runtime.tensors.tensor import Tensor
from hearth.runtime.vision.vision_runner import LocalEmbeddings

ROWS, WIDTH, HIDDEN, FEATURES = 2, 5, 3, 2


def picture(tokens: int, *spans: ImageSpan) -> EmbeddedImage:
    return EmbeddedImage(Slot(0, 0, tokens), tokens, spans)


def test_what_falls_into_a_chunk_has_its_place_there() -> None:
    # Seven embeddings, of which a chunk of a tile layout shows two runs with text between.
    tiled = picture(7, ImageSpan(2, 4, 0), ImageSpan(8, 3, 4))
    other = picture(2, ImageSpan(12, 2, 0))
    rows = [[tiled, other], [], [other]]
    assert image_pieces(rows, [4, 0, 10], [5, 5, 3], 6) == [
        ImagePiece(0, tiled, 2, 2),
        ImagePiece(4, tiled, 4, 1),
        ImagePiece(14, other, 0, 1),
    ]
    assert image_pieces(rows, [14, 0, 0], [3, 5, 12], 12) == []


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 20])
def test_chunks_of_any_size_take_every_embedding_once(chunk: int) -> None:
    spans = (ImageSpan(1, 3, 0), ImageSpan(4, 2, 3), ImageSpan(9, 8, 5))
    image = picture(13, *spans)
    found: dict[int, int] = {}
    for begin in range(0, 20, chunk):
        for place, _, first, tokens in image_pieces([[image]], [begin], [chunk], chunk):
            found |= {begin + place + i: first + i for i in range(tokens)}
    expected = {span.start + i: span.first + i for span in spans for i in range(span.length)}
    assert found == expected


def inputs() -> tuple[Tensor, list[Tensor]]:
    """Embedded text, and the deepstack features of a step."""
    shape = (ROWS, WIDTH, HIDDEN)
    embeds = Tensor("inputs_embeds", np.full(shape, -1, np.float32))
    deepstack = [
        Tensor(f"deepstack_embeds_{i}", np.zeros(shape, np.float32)) for i in range(FEATURES)
    ]
    return embeds, deepstack


def features(tokens: int, seed: int) -> NDArray[Any]:
    random = np.random.default_rng(seed)
    return random.standard_normal((1 + FEATURES, tokens, HIDDEN), np.float32)


def test_every_feature_goes_into_its_buffer_and_zeros_come_back_behind_it() -> None:
    store, (embeds, deepstack) = LocalEmbeddings(), inputs()
    array = features(4, 1)
    image = EmbeddedImage(store.put(array), 4, (ImageSpan(0, 4),))
    merge = ImageMerge(store, CpuDevice(), embeds, deepstack)
    merge.merge([ImagePiece(6, image, 1, 3)])
    assert (embeds.array.reshape(-1, HIDDEN)[6:9] == array[0, 1:]).all()
    for buffer, feature in zip(deepstack, array[1:], strict=True):
        flat = buffer.array.reshape(-1, HIDDEN)
        assert (flat[6:9] == feature[1:]).all()
        assert np.flatnonzero(flat.any(axis=1)).tolist() == [6, 7, 8]
    merge.merge([])
    assert not any(buffer.array.any() for buffer in deepstack)
    assert (merge.metrics.images, merge.metrics.tokens) == (0, 3)


def test_embeddings_that_are_gone_leave_no_features_behind() -> None:
    store, (embeds, deepstack) = LocalEmbeddings(), inputs()
    kept, gone = (
        EmbeddedImage(store.put(features(1, seed)), 1, (ImageSpan(0, 1),)) for seed in (1, 2)
    )
    store.drop(gone.slot)
    merge = ImageMerge(store, CpuDevice(), embeds, deepstack)
    with pytest.raises(HearthError) as caught:
        merge.merge([ImagePiece(0, kept, 0, 1), ImagePiece(1, gone, 0, 1)])
    assert caught.value.code == "internal"
    merge.merge([])
    assert not any(buffer.array.any() for buffer in deepstack)


def test_a_slot_that_is_given_away_while_it_is_read_is_noticed() -> None:
    class Fleeting(LocalEmbeddings):
        def read(self, image: EmbeddedImage) -> NDArray[Any]:
            found = super().read(image)
            self.drop(image.slot)
            return found

    store, (embeds, deepstack) = Fleeting(), inputs()
    image = EmbeddedImage(store.put(features(1, 1)), 1, (ImageSpan(0, 1),))
    with pytest.raises(HearthError, match="are not there"):
        ImageMerge(store, CpuDevice(), embeds, deepstack).merge([ImagePiece(0, image, 0, 1)])
