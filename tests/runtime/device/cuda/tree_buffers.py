"""The buffers of token trees, random ones on the host and equal ones on the device."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hearth.runtime.device.cuda.cuda_device import CudaDevice
from hearth.runtime.device.device import ProposalBuffers, StepBuffers, TreeBuffers
from hearth.runtime.tensors.tensor import Tensor

HALF, FLOAT = np.dtype(np.float16), np.dtype(np.float32)
INT32, INT64 = np.dtype(np.int32), np.dtype(np.int64)
ROWS, VOCAB, HIDDEN = 8, 50, 24


class Shape(NamedTuple):
    """What is proposed: K tokens after a node over T levels, from a draft vocabulary."""

    rows: int
    top_k: int
    steps: int
    vocab: int

    @property
    def slots(self) -> int:
        return self.top_k * self.steps

    @property
    def entries(self) -> int:
        return 1 + self.top_k + (self.steps - 1) * self.top_k**2


def step_buffers(
    width: int, index: np.dtype[Any], *, masked: bool = True, packed: bool = False
) -> StepBuffers:
    rng = np.random.default_rng(width)
    return StepBuffers(
        embedding=Tensor("table", rng.standard_normal((VOCAB, HIDDEN)).astype(HALF)),
        next_tokens=Tensor("next", rng.integers(0, VOCAB, ROWS).astype(np.int32)),
        inputs_embeds=Tensor.zeros("embeds", (ROWS, width, HIDDEN), HALF),
        attention_pos_id=Tensor("positions", np.full((ROWS, width), 9, index)),
        last_token_ids=Tensor("select", np.full((ROWS, width), 9, index)),
        lengths=Tensor("start", rng.integers(0, 1000, ROWS).astype(index)),
        tree_mask=Tensor("mask", np.full((ROWS, width, width), fill_value=True))
        if masked
        else None,
        packed_mask=Tensor("packed", np.full((ROWS, width, -(-width // 32)), -1, INT32))
        if packed
        else None,
    )


def tree_buffers(width: int) -> TreeBuffers:
    return TreeBuffers(
        Tensor("ids", np.full((ROWS, width), 3, INT32)),
        Tensor("parents", np.full((ROWS, width), -2, INT32)),
    )


def proposal_buffers(shape: Shape, data: np.dtype[Any], *, mapped: bool) -> ProposalBuffers:
    rng = np.random.default_rng(shape.vocab)
    full_ids = rng.permutation(shape.vocab).astype(np.int32) % VOCAB

    def filled(name: str, width: int, dtype: np.dtype[Any] = INT32) -> Tensor:
        return Tensor(name, np.full((ROWS, width), 7, dtype))

    return ProposalBuffers(
        logits=Tensor.zeros("logits", (ROWS, shape.top_k, shape.vocab), FLOAT),
        hidden_states=Tensor.zeros("hidden out", (ROWS, shape.top_k, HIDDEN), data),
        hidden_states_from_draft=Tensor.zeros("hidden in", (ROWS, shape.slots + 1, HIDDEN), data),
        full_ids=Tensor("full ids", full_ids) if mapped else None,
        ids=filled("ids", shape.slots),
        parents=filled("parents", shape.slots),
        entries=filled("entries", shape.slots),
        table_ids=filled("table ids", shape.entries),
        table_parents=filled("table parents", shape.entries),
        table_scores=filled("table scores", shape.entries, FLOAT),
    )


def on_gpu(gpu: CudaDevice, buffers: Iterable[Tensor | None]) -> list[Any]:
    """The same contents on the device, in the order of the host's buffers."""
    return [tensor and gpu.constant(tensor.name, tensor.array) for tensor in buffers]


def assert_same(
    gpu: CudaDevice, device: Iterable[Tensor | None], host: Iterable[Tensor | None]
) -> None:
    for got, wanted in zip(device, host, strict=True):
        if got is not None and wanted is not None:
            np.testing.assert_array_equal(gpu.read(got), wanted.array, wanted.name, strict=True)


def random_trees(
    rng: np.random.Generator, rows: int, width: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Ids and parents of trees with different numbers of nodes, chains among them."""
    ids = rng.integers(0, VOCAB, (rows, width)).astype(np.int32)
    parents = np.full((rows, width), -2, np.int32)
    for row in parents:
        count = int(rng.integers(1, width + 1))
        nearest = rng.random() < 0.3
        row[0] = -1
        row[1:count] = [
            node - 1 if nearest else rng.integers(max(0, node - 20), node)
            for node in range(1, count)
        ]
    return ids, parents


def random_logits(
    rng: np.random.Generator, kind: str, shape: tuple[int, ...]
) -> NDArray[np.float32]:
    """Log-probabilities: "plain", full of "ties", or with what is not finite among them."""
    logits: NDArray[np.float32] = rng.standard_normal(shape).astype(np.float32)
    if kind == "ties":
        return np.minimum(np.round(logits), 0)
    logits = np.minimum(logits - np.float32(2), np.float32(0.25))
    if kind == "odd":
        for value in (np.nan, -np.inf, 0.5, -0.0):
            logits[rng.random(shape) < 0.2] = value
        logits.reshape(-1, shape[-1])[0] = rng.choice([np.nan, -np.inf])
    return logits
