"""Arguments of the kernels of products, and the matrices of an engine that they are given."""

import ctypes
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from hearth.runtime.config import DType, LLMEngineRunnerConfig
from hearth.runtime.device.cuda.launch import addresses, integers
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.engine import IOTensor
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
    """A row-major matrix of `rows` outputs: device addresses, 0 for a tensor that it does not have.

    `bias`, of the engine's type, is added to the sums.
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


_INTEGERS = np.dtype(np.uint8)


class WeightForm(NamedTuple):
    """A matrix of an engine: its output rows, its form, and the names of its other tensors."""

    rows: int
    form: Form
    scale: str
    zero: str
    bias: str


def weight_forms(
    io_tensors: Sequence[IOTensor], config: LLMEngineRunnerConfig
) -> dict[str, WeightForm]:
    """The matrices among an engine's bindings, by name.

    Raises `engine_incompatible` naming a matrix that kernels of the engine's type do not read, or
    whose rows differ from `config`.
    """
    known = {one.name: one for one in io_tensors}
    found = {}
    for name, tensor in known.items():
        inputs = _inputs(name, config)
        if inputs:
            form = _form(tensor, known, inputs, config.dtype)
            rows = int(tensor.shape[0] or 0)
            if rows != _rows(name, config, rows):
                raise HearthError(
                    "engine_incompatible",
                    f"{name} has {rows} rows, which config.json does not say: export the model "
                    "again",
                    name,
                )
            scale, zero, bias = f"{name}.scale", f"{name}.zero", f"{name}_bias"
            found[name] = WeightForm(rows, form, scale, zero, bias)
    return found


def bound_weight(forms: Mapping[str, WeightForm], name: str, at: Mapping[str, int]) -> Weight:
    """A matrix with the addresses that a step binds for it; `engine_incompatible` without it."""
    known = forms.get(name)
    if known is None:
        raise HearthError(
            "engine_incompatible", f"the weights lack {name}: export the model again", name
        )
    scale, zero, bias = (at.get(one, 0) for one in (known.scale, known.zero, known.bias))
    return Weight(at[name], known.rows, known.form, scale, zero, bias)


def _inputs(name: str, config: LLMEngineRunnerConfig) -> int:
    """Return the input width of a product with this tensor; 0 if it is no matrix."""
    if name in ("embedding", "head"):
        return config.hidden_size
    if name == "fc":
        return config.base_hidden_dim
    layer, _, kind = name.rpartition(".")
    if not layer.startswith("layers."):
        return 0
    # A draft's heads read the embedded token and the hidden state behind it.
    wide = 2 * config.hidden_size if config.base_hidden_dim else config.hidden_size
    queries = config.num_attention_heads * config.head_dim
    known = {"q": wide, "k": wide, "v": wide, "o": queries, "down": config.intermediate_size}
    known |= {"gate": config.hidden_size, "up": config.hidden_size}
    return known.get(kind, 0)


def _rows(name: str, config: LLMEngineRunnerConfig, otherwise: int) -> int:
    """Return the output width of a product with this matrix, as the step's buffers have it."""
    keys = config.num_kv_heads * config.head_dim
    known = {"q": config.num_attention_heads * config.head_dim, "k": keys, "v": keys}
    known |= dict.fromkeys(("gate", "up"), config.intermediate_size)
    known |= dict.fromkeys(("o", "down", "fc"), config.hidden_size)
    known |= {"embedding": config.vocab_size, "head": config.output_vocab_size}
    return known.get(name.rpartition(".")[2], otherwise)


def _form(tensor: IOTensor, known: dict[str, IOTensor], inputs: int, dtype: DType) -> Form:
    shape = tensor.shape
    if dtype != "float32" and (tensor.dtype.name, shape[1:]) == (dtype, (inputs,)):
        return Form(dtype, 0, zeros=False)
    scale = known.get(f"{tensor.name}.scale")
    if tensor.dtype == _INTEGERS and scale is not None and shape[1:] in ((inputs,), (inputs // 2,)):
        block = inputs // int(scale.shape[1] or inputs)
        kind: Literal["int8", "int4"] = "int8" if shape[1] == inputs else "int4"
        return Form(kind, block, zeros=f"{tensor.name}.zero" in known)
    raise HearthError(
        "engine_incompatible",
        f"{tensor.name} is {tensor.dtype} {list(shape)}, which kernels of {dtype} do not read",
        tensor.name,
    )
