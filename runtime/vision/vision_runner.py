"""Runs of a vision tower, and embeddings kept in the process of their runtime."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hearth.runtime.device.device import Device
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.engine import EngineOptions
from hearth.runtime.executor.engine_executor import EngineExecutor
from hearth.runtime.images import EmbeddedImage, ImageLayout, Slot
from hearth.runtime.tensors.profiles import TowerDims
from hearth.runtime.tensors.registry import build_registry_for_tower, tower_dims, tower_outputs
from hearth.runtime.tensors.tensor import TensorMap, numpy_dtype
from hearth.runtime.undo import undoing
from hearth.runtime.vision.tower_inputs import Call, plan_calls, tower_inputs
from hearth.runtime.vision_config import VisionConfig

Patches = NDArray[np.uint8]
Images = Sequence[NDArray[Any]] | Mapping[int, NDArray[Any]]
"""An array for each picture of a call, by what its pieces call it."""


class VisionRunner:
    """Runs the tower of an engine folder over the patches of pictures; one call at a time.

    It owns `executor`. Inputs and outputs have buffers of the largest call on the device.
    """

    def __init__(self, executor: EngineExecutor, config: VisionConfig, device: Device) -> None:
        self.config = config
        self.executor = executor
        self._device = device
        self._tensors = allocate_tower_buffers(
            config, tower_dims(config, config.max_patches), device
        )

    @classmethod
    def open(
        cls, folder: Path, config: VisionConfig, options: EngineOptions, device: Device
    ) -> "VisionRunner":
        """Load the tower of `folder`, which was checked before; raises `engine_*`, `out_of_memory`.

        An engine that needs context memory gets it from its caller.
        """
        with undoing() as undo:
            executor = EngineExecutor.create_for_tower(folder, config, options, device)
            undo.callback(executor.close)
            return cls(executor, config, device)

    def encode(self, images: Sequence[tuple[Patches, ImageLayout]]) -> list[NDArray[Any]]:
        """Embeddings of pictures: [1 + deepstack features, tokens, output_size] each.

        `images` are patches [T, patch_bytes] and what they are of. Raises `image_too_large`,
        `executor_failed`, `out_of_memory`, and `non_finite` where an embedding is no number.
        """
        config, patches = self.config, [one for one, _ in images]
        outputs, dtype = len(tower_outputs(config)), numpy_dtype(config.embedding_dtype)
        out = [np.empty((outputs, one.tokens, config.output_size), dtype) for _, one in images]
        for call in plan_calls([layout for _, layout in images], config):
            self.run(call, patches, out)
        return out

    def run(self, call: Call, images: Images, out: Images) -> None:
        """Do one call of `plan_calls` and wait for it; raises as `encode` does."""
        self.queue(call, images)
        self._device.record_event().wait()
        self.collect(call, out)

    def queue(self, call: Call, images: Images) -> None:
        """Run a call on the device's stream; what was queued before must have been collected."""
        given = tower_inputs([piece.segment for piece in call.pieces], self.config)
        splice, done = self._device.image_ops.splice, 0
        for name, array in given.items():
            tensor, rows = self._tensors.get(name), np.atleast_2d(array)
            splice(tensor.part(name, 0, rows.shape), 0, rows.astype(tensor.dtype, copy=False))
        for image, segment, first in call.pieces:
            rows = images[image][first : first + segment.patches]
            splice(self._tensors.get("patches"), done, rows)
            done += segment.patches
        dims, stream = tower_dims(self.config, call.patches), self._device.stream
        self.executor.prepare(0, dims, self._tensors, stream)
        self.executor.execute(stream)

    def collect(self, call: Call, out: Images) -> None:
        """Copy the embeddings of a call that has ended to where they belong.

        Raises `non_finite` where one is no number.
        """
        merged = self.config.merge_size**2
        for feature, name in enumerate(tower_outputs(self.config)):
            tensor, done = self._tensors.get(name), 0
            for image, segment, first in call.pieces:
                begin, tokens = first // merged, segment.patches // merged
                target = out[image][feature, begin : begin + tokens]
                self._device.fetch(tensor.part(name, done, target.shape), target)
                done += target.size
                if not np.isfinite(target).all():
                    raise HearthError("non_finite", "the vision tower gave no finite numbers")

    def close(self) -> None:
        """Free the engine; the buffers go with the device."""
        self.executor.close()


def allocate_tower_buffers(config: VisionConfig, dims: TowerDims, device: Device) -> TensorMap:
    """Allocate what calls of up to this size bind."""
    tensors = TensorMap()
    for spec in build_registry_for_tower(config).specs:
        tensors.set(spec.name, device.zeros(spec.name, spec.resolve(dims), spec.dtype))
    return tensors


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
