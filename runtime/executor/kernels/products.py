import ctypes
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np

from runtime.device.cuda.launch import addresses, integers
from runtime.errors import HearthError
from runtime.executor.kernels.adapters import (
    Adapter,
    AddedArguments,
    Shrink,
    added_arguments,
)
from runtime.executor.kernels.launch import GpuFacts, Kernels, Launch
from runtime.executor.kernels.product_tiles import (
    columns_for,
    narrow_tiles,
    norms_itself,
    wide_tiles,
)

_THREADS = 256
_NORM_THREADS = 128
_NORM_TOKENS = 4
_MATRICES = 3
_NUMBERS, _RESIDUAL, _GATED = range(3)
_COMMON = (
    *("INPUTS", "OUTPUT", "MATRICES", "BIASED", "ADDED"),
    *("WEIGHT_BITS", "SCALE_BLOCK", "ZEROS"),
)
_NARROW = (
    *_COMMON,
    *("COLUMNS", "EIGHTS", "DEPTH", "RESIDENT", "REPEATED", "NORMED", "SHARED_BYTES"),
)
_WIDE = (
    *_COMMON,
    *("EIGHTS", "WIDTHS", "TILES", "SHARE", "DEPTH", "RESIDENT", "SHARED_BYTES"),
)


class Form(NamedTuple):
    """How weights are stored; integers have a scale, and a zero point or none, for each `block`."""

    kind: Literal["float16", "bfloat16", "int8", "int4"]
    block: int = 0
    zeros: bool = False

    @property
    def bits(self) -> int:
        """Those of a weight."""
        return {"int8": 8, "int4": 4}.get(self.kind, 16)

    @property
    def eight_bytes(self) -> int:
        """What eight rows of 64 weights take in a stage, with their scales and zero points."""
        return 64 * self.bits + (32 * (1 + self.zeros) if self.block else 0)

    @property
    def macros(self) -> tuple[int, int, int]:
        """WEIGHT_BITS, SCALE_BLOCK and ZEROS of a kernel that reads it."""
        return self.bits, self.block, int(self.zeros)


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


class _Matrix(ctypes.Structure):
    _fields_ = (*addresses("values scale zero bias"), *integers("rows unused"))


class _Product(ctypes.Structure):
    _fields_ = (
        ("matrices", _Matrix * _MATRICES),
        *addresses("inputs gain last out tap"),
        *integers("tokens rows groups tap_stride seq_len select_len"),
        ("eps", ctypes.c_float),
        ("unused", ctypes.c_int32),
        ("added", AddedArguments),
    )


class _Normalise(ctypes.Structure):
    _fields_ = (
        *addresses("inputs gain last out"),
        *integers("tokens stride seq_len select_len"),
        ("eps", ctypes.c_float),
        ("unused", ctypes.c_int32),
    )


class _Selected(NamedTuple):
    """Which tokens of [rows, seq_len] are taken: `last` is int64 [rows, select_len]."""

    last: int = 0
    seq_len: int = 1
    select_len: int = 1


class _Inputs(NamedTuple):
    """What a product reads: elements, or float32 rows that are normed where there is a gain."""

    address: int
    size: int
    tokens: int
    gain: int = 0
    eps: float = 0.0
    selected: _Selected = _Selected()


class _Output(NamedTuple):
    kind: int
    address: int
    tap: int = 0
    tap_stride: int = 0


class Products:
    """Launches of matrix products of one engine, whose elements are of `dtype`.

    Addresses are those of the device; x is the residual stream, float32 [tokens, inputs]. The sums
    of a token do not depend on how many tokens there are, nor on the others. What an `adapter` adds
    to a product comes before biases, the residual stream and SiLU.
    """

    def __init__(self, programs: Kernels, facts: GpuFacts, dtype: np.dtype[Any]) -> None:
        self._programs = programs
        self._facts = facts
        self._bfloat = int(dtype == np.dtype(ml_dtypes.bfloat16))
        self._scratch = 0
        self._functions: dict[tuple[str, tuple[int, ...]], Any] = {}
        self._shrink = Shrink(programs, bfloat=self._bfloat)

    def scratch_bytes(self, inputs: int, tokens: int) -> int:
        """What normed inputs of a step take; `use_scratch` says where they are."""
        return 0 if norms_itself(inputs, tokens) else tokens * inputs * 2

    def use_scratch(self, address: int) -> None:
        """Put the normed inputs of the launches to come there."""
        self._scratch = address

    def normed(  # noqa: PLR0917 (addresses and sizes, in the order of a step)
        self,
        x: int,
        gain: int,
        eps: float,
        weights: Sequence[Weight],
        inputs: int,
        tokens: int,
        out: int,
        *,
        adapter: Adapter | None = None,
    ) -> tuple[Launch, ...]:
        """The norm of x times up to three matrices one below the other: float32 [tokens, rows]."""
        given = _Inputs(x, inputs, tokens, gain, eps)
        return self._launches("normed", given, weights, _Output(_NUMBERS, out), adapter)

    def residual(
        self,
        a: int,
        weight: Weight,
        inputs: int,
        tokens: int,
        x: int,
        *,
        tap: tuple[int, int] | None = None,
        adapter: Adapter | None = None,
    ) -> tuple[Launch, ...]:
        """Add to x the product of elements a [tokens, inputs].

        `tap` is an address and a stride in elements: x is also written there, as elements.
        """
        output = _Output(_RESIDUAL, x, *(tap or (0, 0)))
        given = _Inputs(a, inputs, tokens)
        return self._launches("residual", given, [weight], output, adapter)

    def gated(  # noqa: PLR0917 (addresses and sizes, in the order of a step)
        self,
        x: int,
        gain: int,
        eps: float,
        gate: Weight,
        up: Weight,
        inputs: int,
        tokens: int,
        out: int,
        *,
        adapter: Adapter | None = None,
    ) -> tuple[Launch, ...]:
        """The norm of x through silu(gate) * up: elements [tokens, rows]."""
        given = _Inputs(x, inputs, tokens, gain, eps)
        return self._launches("gated", given, [gate, up], _Output(_GATED, out), adapter)

    def head(  # noqa: PLR0917 (addresses and sizes, in the order of a step)
        self,
        x: int,
        gain: int,
        eps: float,
        weight: Weight,
        inputs: int,
        rows: int,
        seq_len: int,
        select_len: int,
        last_token_ids: int,
        logits: int,
    ) -> tuple[Launch, ...]:
        """Logits, float32 [rows, select_len, vocabulary], of the tokens that are selected.

        `last_token_ids`, int64 [rows, select_len], counts from the beginning of each row of x.
        """
        selected = _Selected(last_token_ids, seq_len, select_len)
        given = _Inputs(x, inputs, rows * select_len, gain, eps, selected)
        return self._launches("head", given, [weight], _Output(_NUMBERS, logits))

    def plain(
        self, a: int, weights: Weight | Sequence[Weight], inputs: int, tokens: int, out: int
    ) -> tuple[Launch, ...]:
        """Elements a [tokens, inputs] times matrices one below the other: float32."""
        several = [weights] if isinstance(weights, Weight) else weights
        return self._launches("plain", _Inputs(a, inputs, tokens), several, _Output(_NUMBERS, out))

    def normalise(  # noqa: PLR0917 (addresses and sizes, in the order of a step)
        self, x: int, gain: int, eps: float, inputs: int, tokens: int, out: int, stride: int
    ) -> tuple[Launch, ...]:
        """The norm of x as elements, one token every `stride` elements from `out` on."""
        return (self._normalise(_Inputs(x, inputs, tokens, gain, eps), out, stride),)

    def _launches(
        self,
        name: str,
        given: _Inputs,
        weights: Sequence[Weight],
        output: _Output,
        adapter: Adapter | None = None,
    ) -> tuple[Launch, ...]:
        made = []
        if adapter is not None:
            norm = (given.gain, given.eps) if given.gain else None
            shape = (given.size, given.tokens)
            made.append(self._shrink.launch(given.address, adapter, shape, norm))
        if given.gain and not norms_itself(given.size, given.tokens):
            made.append(self._normalise(given, self._scratch, given.size))
            given = _Inputs(self._scratch, given.size, given.tokens)
        return (*made, self._product(name, given, weights, output, adapter))

    def _normalise(self, given: _Inputs, out: int, stride: int) -> Launch:
        function = self._kernel("normalise", "normalise", ("INPUTS",), (given.size,), 0)
        selected = given.selected
        arguments = _Normalise(
            given.address,
            given.gain,
            selected.last,
            out,
            given.tokens,
            stride,
            selected.seq_len,
            selected.select_len,
            given.eps,
        )
        blocks = -(-given.tokens // _NORM_TOKENS)
        return Launch(function, (blocks, 1, 1), _NORM_THREADS, 0, arguments, "normalise")

    def _product(
        self,
        name: str,
        given: _Inputs,
        weights: Sequence[Weight],
        output: _Output,
        adapter: Adapter | None,
    ) -> Launch:
        form = weights[0].form
        if any(weight.form != form for weight in weights):
            raise HearthError("internal", "the matrices of one product have one form")
        biased = any(weight.bias for weight in weights)
        added = adapter is not None
        common = (given.size, output.kind, len(weights), int(biased), int(added), *form.macros)
        eights = sum(-(-weight.rows // 8) for weight in weights)
        columns = columns_for(given.tokens)
        if columns is None:
            wide = wide_tiles(self._facts, eights, given.tokens, form.eight_bytes)
            shared, groups = wide.shared_bytes, 0
            grid = (-(-eights // wide.eights), -(-given.tokens // (8 * wide.widths)), 1)
            function = self._kernel("wide", "product", _WIDE, (*common, *wide[:-1], shared), shared)
        else:
            paired, normed = output.kind == _GATED, bool(given.gain)
            tiles = narrow_tiles(
                self._facts,
                eights,
                given.size,
                columns,
                paired=paired,
                normed=normed,
                weight_bytes=form.eight_bytes,
            )
            shared, groups = tiles.shared_bytes, tiles.groups
            grid = (tiles.blocks, 1, 1)
            repeated = int(tiles.groups > tiles.blocks)
            shape = (columns, tiles.eights, tiles.depth, tiles.resident, repeated, int(normed))
            function = self._kernel(
                "product", "product", _NARROW, (*common, *shape, shared), shared
            )
        arguments = _arguments(given, weights, output, groups)
        if adapter is not None:
            arguments.added = added_arguments(adapter)
        return Launch(function, grid, _THREADS, shared, arguments, name)

    def _kernel(
        self, file: str, name: str, macros: tuple[str, ...], numbers: tuple[int, ...], shared: int
    ) -> Any:
        """The kernel with these macros, which a step asks for again and again."""
        key = (file, numbers)
        if key not in self._functions:
            chosen = {"BFLOAT": self._bfloat, **dict(zip(macros, numbers, strict=True))}
            self._functions[key] = self._programs.kernel(file, name, chosen, shared)
        return self._functions[key]


def _arguments(given: _Inputs, weights: Sequence[Weight], output: _Output, groups: int) -> _Product:
    matrices = (_Matrix * _MATRICES)()
    for index, weight in enumerate(weights):
        matrices[index] = _Matrix(
            weight.address, weight.scale, weight.zero, weight.bias, weight.rows
        )
    rows = weights[0].rows if output.kind == _GATED else sum(one.rows for one in weights)
    return _Product(
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
