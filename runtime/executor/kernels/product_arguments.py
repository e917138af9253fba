"""Arguments of the kernels of products."""

import ctypes
from collections.abc import Sequence
from typing import Literal, NamedTuple

from hearth.runtime.device.cuda.launch import addresses, integers
from hearth.runtime.executor.kernels.adapters import AddedArguments

NUMBERS, RESIDUAL, GATED = range(3)
_MATRICES = 3


class Form(NamedTuple):
    """Format of stored weights; integers have a scale, and a zero point or none, per `block`."""

    kind: Literal["float16", "bfloat16", "int8", "int4"]
    block: int = 0
    zeros: bool = False

    @property
    def bits(self) -> int:
        """Bits of a weight."""
        return {"int8": 8, "int4": 4}.get(self.kind, 16)

    @property
    def eight_bytes(self) -> int:
        """Bytes of eight rows of 64 weights in a stage, with their scales and zero points."""
        return 64 * self.bits + (32 * (1 + self.zeros) if self.block else 0)


class ProductConfig(NamedTuple):
    """Members of `Config` common to all products: sizes, format of weights, kind of output."""

    bfloat: bool
    inputs: int
    output: int
    matrices: int
    biased: bool
    added: bool
    weight_bits: int
    scale_block: int
    zeros: bool
    shrink_stages: int = 0
    """Stages of an adapter's ranks, where blocks of the product multiply by its A."""


class NormConfig(NamedTuple):
    """`Config` of csrc/gemm/normalise.cu."""

    bfloat: bool
    inputs: int
    staged: bool


class Weight(NamedTuple):
    """A row-major matrix of `rows` outputs: device addresses of it and of what belongs to it.

    `bias`, of the engine's type, is added to the sums; 0 for none.
    """

    address: int
    rows: int
    form: Form
    scale: int = 0
    zero: int = 0
    bias: int = 0


class Matrix(ctypes.Structure):
    """`Matrix` of csrc/gemm/outputs.cuh."""

    _fields_ = (*addresses("values scale zero bias"), *integers("rows unused"))


class ProductArguments(ctypes.Structure):
    """`Arguments` of csrc/gemm/outputs.cuh."""

    _fields_ = (
        ("matrices", Matrix * _MATRICES),
        *addresses("inputs gain last out tap"),
        *integers("tokens rows groups tap_stride seq_len select_len"),
        ("eps", ctypes.c_float),
        ("early", ctypes.c_int32),
        ("added", AddedArguments),
    )


class NormArguments(ctypes.Structure):
    """`Arguments` of csrc/gemm/normalise.cu."""

    _fields_ = (
        *addresses("inputs gain last out"),
        *integers("tokens stride seq_len select_len"),
        ("eps", ctypes.c_float),
        ("unused", ctypes.c_int32),
    )


class Selected(NamedTuple):
    """Selection of tokens from [rows, seq_len]: `last` is int64 [rows, select_len]."""

    last: int = 0
    seq_len: int = 1
    select_len: int = 1


class Inputs(NamedTuple):
    """Input of a product: elements, or float32 rows that are normed if there is a gain.

    Elements that are `staged` lie as csrc/common/staged.cuh says.
    """

    address: int
    size: int
    tokens: int
    gain: int = 0
    eps: float = 0.0
    selected: Selected = Selected()
    staged: bool = False


class Output(NamedTuple):
    """Output of a product: `kind` is that of csrc/gemm/outputs.cuh.

    `staged` activations are written as csrc/common/staged.cuh says.
    """

    kind: int
    address: int
    tap: int = 0
    tap_stride: int = 0
    staged: bool = False


def product_arguments(
    given: Inputs, weights: Sequence[Weight], output: Output, groups: int
) -> ProductArguments:
    """A product's argument; `groups` of rows are shared out over its blocks or clusters."""
    matrices = (Matrix * _MATRICES)()
    for index, weight in enumerate(weights):
        matrices[index] = Matrix(
            weight.address, weight.scale, weight.zero, weight.bias, weight.rows
        )
    rows = weights[0].rows if output.kind == GATED else sum(one.rows for one in weights)
    return ProductArguments(
        matrices,
        given.address,
        given.gain,
        given.selected.last,
        output.address,
        output.tap,
        given.tokens,
        rows,
        groups,
        output.tap_stride,
        given.selected.seq_len,
        given.selected.select_len,
        given.eps,
    )
