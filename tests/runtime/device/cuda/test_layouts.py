"""Structures that a kernel is given lie in ctypes as they do in CUDA: name, place and size."""

import ctypes
from typing import Any

import pytest

from hearth.runtime.device.cuda.compiler import (
    KernelAttribute,
    KernelConfig,
    kernel_source,
    load_compiler_api,
)
from hearth.runtime.device.cuda.cuda_device import RotaryArguments
from hearth.runtime.device.cuda.ops import FeedArguments, FoundArguments, LengthsArguments
from hearth.runtime.device.cuda.sample_ring import RESULT
from hearth.runtime.device.cuda.sampler import BatchArguments, TokenMoves
from hearth.runtime.device.cuda.storage import Moves, PagesArguments, PathArguments, RowsArguments
from hearth.runtime.device.cuda.tree_ops import (
    ChainArguments,
    FinishArguments,
    NodesArguments,
    ProposalArguments,
)
from hearth.runtime.device.cuda.walks import WalkArguments
from hearth.runtime.device.cuda.wide_draws import ROW, WideArguments
from hearth.runtime.executor.kernels.adapters import AddedArguments, ShrinkArguments, ShrinkConfig
from hearth.runtime.executor.kernels.attention import (
    AttentionArguments,
    AttentionConfig,
    HeadConfig,
)
from hearth.runtime.executor.kernels.draft_step import (
    DraftConfig,
    FuseArguments,
    ScoresArguments,
    SelectArguments,
)
from hearth.runtime.executor.kernels.product_arguments import (
    Matrix,
    NormArguments,
    NormConfig,
    ProductArguments,
    ProductConfig,
)
from hearth.runtime.executor.kernels.product_tiles import WideTiles
from hearth.runtime.executor.kernels.products import TiledConfig
from hearth.runtime.executor.kernels.step import StreamArguments, StreamConfig

pytest.importorskip("cuda.bindings.nvrtc", exc_type=ImportError)
TYPES = ("-DINDEX=long long", "-DUNIT=uint4", "-DHIDDEN=uint4", "-DEACH=1")
TILES = WideTiles(8, 16, 2, 8, 4, 2)
TILED = TiledConfig(
    ProductConfig(
        bfloat=False,
        inputs=1024,
        output=0,
        matrices=1,
        biased=False,
        added=True,
        weight_bits=16,
        scale_block=0,
        zeros=False,
    ),
    TILES,
    even=True,
    shared_bytes=TILES.shared_bytes,
    cluster_dims=KernelAttribute(),
)
HEADS = HeadConfig(bfloat=False, dim=128, rotary=128, query_heads=16, kv_heads=8, early=False)
LAYOUTS: dict[str, tuple[KernelConfig | None, dict[str, Any]]] = {
    "attention/attention": (AttentionConfig(HEADS, 4), {"Arguments": AttentionArguments}),
    "decoder/draft": (
        DraftConfig(bfloat=False),
        {"Fuse": FuseArguments, "Select": SelectArguments, "Scores": ScoresArguments},
    ),
    "decoder/enter": (StreamConfig(bfloat=False), {"Arguments": StreamArguments}),
    "gemm/normalise": (NormConfig(False, 1024, False), {"Arguments": NormArguments}),
    "gemm/tiled": (
        TILED,
        {"Arguments": ProductArguments, "Matrix": Matrix, "Added": AddedArguments},
    ),
    "lora/shrink": (ShrinkConfig(False, 1024), {"Shrink": ShrinkArguments}),
    "sampling/sampling": (
        None,
        {"Batch": BatchArguments, "Moves": TokenMoves, "Row": ROW, "Result": RESULT},
    ),
    "step/cache": (
        None,
        {"Rows": RowsArguments, "Moves": Moves, "Pages": PagesArguments, "Path": PathArguments},
    ),
    "step/rotary": (None, {"Rotary": RotaryArguments}),
    "step/steps": (
        None,
        {"Feed": FeedArguments, "Found": FoundArguments, "Lengths": LengthsArguments},
    ),
    "tree/chain": (None, {"Chain": ChainArguments}),
    "tree/feed": (None, {"Nodes": NodesArguments}),
    "tree/tree": (None, {"Proposal": ProposalArguments, "Finish": FinishArguments}),
    "tree/walk": (None, {"Walk": WalkArguments, "Wide": WideArguments}),
}


def places(kind: Any) -> dict[str, tuple[int, int]]:
    """Where each field of a structure or of a type of NumPy lies, and what it takes."""
    if not hasattr(kind, "_fields_"):
        return {name: (at, one.itemsize) for name, (one, at) in kind.fields.items()}
    fields = ((name, getattr(kind, name)) for name, *_ in kind._fields_)
    return {name: (one.offset, one.size) for name, one in fields}


def checks(name: str, kind: Any) -> str:
    """Assertions of C++ that a structure lies so."""
    size = ctypes.sizeof(kind) if hasattr(kind, "_fields_") else kind.itemsize
    lines = [f"static_assert(sizeof({name}) == {size});"]
    for field, (at, taken) in places(kind).items():
        if field == "unused":
            continue
        lines.append(f"static_assert(__builtin_offsetof({name}, {field}) == {at});")
        lines.append(f"static_assert(sizeof((({name}*)0)->{field}) == {taken});")
    return "\n".join(lines)


def log_of(source: str, types: tuple[str, ...] = ()) -> str:
    """What the compiler has to say of a source; nothing where it is right."""
    api: Any = load_compiler_api()
    _, program = api.nvrtcCreateProgram(source.encode(), b"layout.cu", 0, [], [])
    options = [
        option.encode()
        for option in ("--std=c++20", "-default-device", "-arch=compute_90", "-w", *types)
    ]
    (failed,) = api.nvrtcCompileProgram(program, len(options), options)
    _, size = api.nvrtcGetProgramLogSize(program)
    log = bytearray(size)
    api.nvrtcGetProgramLog(program, log)
    return log.decode() if failed else ""


@pytest.mark.parametrize("file", LAYOUTS)
def test_arguments_lie_as_their_kernel_reads_them(file: str) -> None:
    config, kinds = LAYOUTS[file]
    asserted = "\n".join(checks(name, kind) for name, kind in kinds.items())
    types = TYPES if config is None else ()
    assert not log_of(f"{kernel_source(file, config)}\n{asserted}\n", types)


def test_the_check_itself_finds_fields_that_changed_places() -> None:
    class Turned(ctypes.Structure):
        _fields_ = NormArguments._fields_[1::-1] + NormArguments._fields_[2:]

    source = kernel_source("gemm/normalise", NormConfig(False, 1024, False))
    assert "static assertion failed" in log_of(f"{source}\n{checks('Arguments', Turned)}\n")
