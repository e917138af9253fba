import ctypes

import numpy as np

from runtime.device.cuda.element_types import copy_unit
from runtime.device.cuda.launch import addresses, integers
from runtime.device.cuda.memory import CudaMemory
from runtime.device.cuda.ops import feed_arguments
from runtime.device.cuda.programs import KernelLibrary
from runtime.device.device import ChainBuffers
from runtime.errors import HearthError

_THREADS = 256
# A block searches so many logits; more blocks than that serve no purpose.
_EACH, _MOST_PARTS = 4096, 64


class ChainArguments(ctypes.Structure):
    """`Chain` of csrc/tree/chain.cu."""

    _fields_ = (
        *addresses("logits full_ids best done ids lengths filled fresh given"),
        *integers("vocab nodes width level"),
    )


class ChainStep:
    """The launch that takes a level's best tokens and feeds the draft's next step with them."""

    def __init__(self, library: KernelLibrary, memory: CudaMemory, buffers: ChainBuffers) -> None:
        step, rows = buffers.step, buffers.step.lengths.shape[0]
        vocab, size = buffers.logits.shape[-1], buffers.hidden_states.shape[-1]
        fresh, given = buffers.hidden_states, buffers.hidden_states_from_draft
        given.check((rows, 1, size))
        if fresh.dtype != given.dtype or buffers.lengths.dtype != step.lengths.dtype:
            raise HearthError("internal", "the buffers of a chain differ in type")
        best = memory.zeros("best of the draft", (rows,), np.dtype(np.uint64))
        pitch = size * fresh.dtype.itemsize
        nbytes, unit = copy_unit(pitch)
        self._rows, self._nodes = rows, buffers.trees.ids.shape[1]
        self._parts = min(_MOST_PARTS, -(-vocab // _EACH))
        self._arguments = ChainArguments(
            buffers.logits.address,
            0 if buffers.full_ids is None else buffers.full_ids.address,
            best.address,
            memory.zeros("chain blocks", (rows,), np.dtype(np.uint32)).address,
            buffers.trees.ids.address,
            buffers.lengths.address,
            step.lengths.address,
            fresh.address,
            given.address,
            vocab,
            0,
            pitch // nbytes,
        )
        self._feed, options = feed_arguments(step)
        self._launch = library.prepare(
            "tree/chain",
            "follow_chain",
            (*options, f"-DHIDDEN={unit}"),
            _THREADS,
            (self._feed, self._arguments),
        )

    def launch(self, rows: int, nodes: int, level: int) -> None:
        """Queue level `level` of chains of `nodes` nodes, the root included."""
        if not (0 < rows <= self._rows and 0 <= level <= nodes - 2 <= self._nodes - 2):
            raise HearthError("internal", f"{rows} chains of {nodes} nodes have no level {level}")
        self._arguments.nodes, self._arguments.level = nodes, level
        self._launch.launch_dependent(self._parts, rows)
