"""Which launches a draft's steps have: nothing for hidden states or numbers that nobody reads."""

import numpy as np
import pytest
from msgspec import structs

from hearth.runtime.device.cuda.programs import WantedKernels
from hearth.runtime.executor.kernels.draft_step import DraftStep
from hearth.runtime.executor.kernels.engine import io_tensors_of
from hearth.runtime.executor.kernels.step import StepShape
from hearth.runtime.tensors.profiles import InferenceDims
from hearth.runtime.tensors.registry import TensorSpec, build_registry_for_spec_decode_draft
from hearth.runtime.weights.weights_file import WeightEntry
from tests.runtime.executor.kernels.kernel_engines import (
    FACTS,
    bindings_of,
    kernels_config,
    layout_of,
)

BASE_HIDDEN = 96


def names(dims: InferenceDims, *, given: bool, ranks_alone: bool) -> list[str]:
    """What the launches of a step do, in order; of hidden states of the base or without."""
    config = kernels_config(base_hidden_dim=BASE_HIDDEN, num_decoder_layers=1)
    hidden, layout = config.hidden_size, layout_of(config, tied=False)
    own: dict[str, tuple[int, ...]] = {"fc": (hidden, BASE_HIDDEN)}
    own |= {f"layers.0.{one}_norm": (hidden,) for one in ("embedded", "fused")}
    rows = {one: layout.tensors[f"layers.0.{one}"].shape[0] for one in "qkv"}
    own |= {f"layers.0.{one}": (size, 2 * hidden) for one, size in rows.items()}
    tensors = layout.tensors | {n: WeightEntry("F16", shape, 0, 0) for n, shape in own.items()}
    layout = structs.replace(layout, tensors=tensors)
    registry = build_registry_for_spec_decode_draft(config)
    for name, entry in layout.taken.items():
        registry.add_own(TensorSpec(name, "input", np.dtype(np.float16), entry.shape))
    io = io_tensors_of(config, registry)
    step = DraftStep(config, layout, io, WantedKernels(), FACTS)
    step.ranks_alone = ranks_alone
    step.provide([StepShape(2, 8, 64, 1)])
    step.use_scratch(1 << 40)
    step.use_tickets(1 << 41)
    bindings = [
        one._replace(shape=(2, dims.seq_len if given else 0, BASE_HIDDEN))
        if one.name == "hidden_states_input"
        else one
        for one in bindings_of(io, registry, dims)
    ]
    return [one.name for one in step.launches(bindings)]


@pytest.mark.parametrize("dims", [InferenceDims.accept(2, 8, 64), InferenceDims.decode(2, 64)])
def test_steps_without_hidden_states_of_the_base_leave_out_what_reads_them(
    dims: InferenceDims,
) -> None:
    entering, growing = (names(dims, given=one, ranks_alone=False) for one in (True, False))
    assert entering[:2] == ["plain", "fuse"]
    assert growing == entering[1:]


def test_where_ranks_alone_are_read_logits_stay() -> None:
    dims = InferenceDims.decode(2, 64)
    whole, ranked = (names(dims, given=False, ranks_alone=one) for one in (False, True))
    assert whole[-2:] == ["measure", "normalise"]
    assert ranked == whole[:-2]
