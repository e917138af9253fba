from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from hearth.runtime.device.cuda.compiler import KernelAttribute, KernelConfig
from hearth.runtime.device.cuda.gpu_facts import GpuFacts
from hearth.runtime.device.cuda.launch import Launch
from hearth.runtime.device.cuda.programs import Kernels
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.kernels.adapters import (
    Adapter,
    LoraMailbox,
    Shrink,
    ShrinkBlocks,
    added_arguments,
    shrink_blocks,
)
from hearth.runtime.executor.kernels.product_arguments import (
    GATED,
    NUMBERS,
    RESIDUAL,
    Form,
    Inputs,
    NormArguments,
    NormConfig,
    Output,
    ProductConfig,
    Selected,
    Weight,
    product_arguments,
)
from hearth.runtime.executor.kernels.product_tiles import (
    COLUMNS,
    GroupTiles,
    NarrowTiles,
    WideTiles,
    columns_for,
    group_tiles,
    is_rehearsed,
    most_blocks,
    narrow_tiles,
    norms_itself,
    takes_many,
    wide_tiles,
)

_THREADS = 256
_ELEMENT_BITS = 16
_NORM_THREADS = 128
_NORM_TOKENS = 4
# Tokens of a residual product up to which its blocks are placed before its predecessor has ended.
_TOGETHER = 128
# Value of `early` where a product also runs once before it waits.
_REHEARSED = 2


class GemvConfig(NamedTuple):
    """`Config` of csrc/gemm/gemv.cu: `columns` tokens of `shares` by `eights` times eight rows."""

    product: ProductConfig
    columns: int
    shares: int
    eights: int
    depth: int
    token_stages: int
    resident: int
    repeated: bool
    normed: bool
    shared_bytes: int


class TiledConfig(NamedTuple):
    """`Config` of csrc/gemm/tiled.cu."""

    product: ProductConfig
    tiles: WideTiles
    even: bool
    shared_bytes: int
    cluster_dims: KernelAttribute


class WgmmaConfig(NamedTuple):
    """`Config` of csrc/gemm/wgmma.cu."""

    product: ProductConfig
    tiles: GroupTiles
    passed: bool
    shared_bytes: int


class _Chosen(NamedTuple):
    """A kernel and over what it is launched."""

    function: Any
    blocks: tuple[int, int, int]
    shared: int
    groups: int
    threads: int = _THREADS
    apart: bool = False
    rehearsed: bool = False


class Products:
    """Launches of matrix products of one engine, whose elements are of `dtype`.

    Addresses are device addresses; x is the residual stream, float32 [tokens, inputs]. The sums of
    a token depend neither on the number of tokens nor on the other tokens. The part of an `adapter`
    is added to a product before biases, the residual stream and SiLU.
    """

    def __init__(self, programs: Kernels, facts: GpuFacts, dtype: np.dtype[Any]) -> None:
        self._programs = programs
        self._facts = facts
        self._bfloat = bool(dtype == np.dtype(ml_dtypes.bfloat16))
        self._scratch = self._rows = 0
        self._mailbox = LoraMailbox()
        self._functions: dict[tuple[str, KernelConfig], Any] = {}
        self._shrink = Shrink(programs, bfloat=self._bfloat)

    def scratch_bytes(self, inputs: int, tokens: int) -> int:
        """Return the bytes of a step's normed inputs; `use_scratch` sets their address."""
        return 0 if norms_itself(inputs, tokens) else tokens * inputs * 2

    def use_scratch(self, address: int, rows: int = 0) -> None:
        """Put the normed inputs of coming launches, of a step of `rows` rows, at this address."""
        self._scratch, self._rows = address, rows

    def use_mailbox(self, address: int, tokens: int, width: int) -> tuple[int, int]:
        """Set the mailbox of x A for the products of a step: twice float32 [tokens, width].

        Returns address and number of elements that must be reset before the first product.
        """
        return self._mailbox.use(address, tokens, width)

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
        given = Inputs(x, inputs, tokens, gain, eps)
        return self._launches("normed", given, weights, Output(NUMBERS, out), adapter)

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
        staged: bool = False,
    ) -> tuple[Launch, ...]:
        """Add to x the product of elements a [tokens, inputs], which may be `staged`.

        `tap` is an address and a stride in elements: x is also written there, as elements.
        """
        output = Output(RESIDUAL, x, *(tap or (0, 0)))
        given = Inputs(a, inputs, tokens, staged=staged)
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
        staged: bool = False,
    ) -> tuple[Launch, ...]:
        """The norm of x through silu(gate) * up: elements [tokens, rows], which may be `staged`."""
        given = Inputs(x, inputs, tokens, gain, eps)
        output = Output(GATED, out, staged=staged)
        return self._launches("gated", given, [gate, up], output, adapter)

    def stages(self, gate: Weight, up: Weight, down: Weight, inputs: int, tokens: int) -> bool:
        """Return True if gate and up can write the stage layout of down, without adapters."""
        gated = self._group_tiles(Inputs(0, inputs, tokens), [gate, up], Output(GATED, 0))
        return gated is not None and self.takes_stages(down, gate.rows, tokens)

    def takes_stages(self, weight: Weight, inputs: int, tokens: int) -> bool:
        """Return True if a residual product can read inputs in stage layout, without adapters."""
        given = Inputs(0, inputs, tokens)
        return self._group_tiles(given, [weight], Output(RESIDUAL, 0)) is not None

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
        selected = Selected(last_token_ids, seq_len, select_len)
        given = Inputs(x, inputs, rows * select_len, gain, eps, selected)
        return self._launches("head", given, [weight], Output(NUMBERS, logits))

    def plain(
        self, a: int, weights: Weight | Sequence[Weight], inputs: int, tokens: int, out: int
    ) -> tuple[Launch, ...]:
        """Elements a [tokens, inputs] times matrices one below the other: float32."""
        several = [weights] if isinstance(weights, Weight) else weights
        return self._launches("plain", Inputs(a, inputs, tokens), several, Output(NUMBERS, out))

    def _launches(
        self,
        name: str,
        given: Inputs,
        weights: Sequence[Weight],
        output: Output,
        adapter: Adapter | None = None,
    ) -> tuple[Launch, ...]:
        made: list[Launch] = []
        if given.gain and not norms_itself(given.size, given.tokens):
            staged = adapter is None and self._group_tiles(given, weights, output) is not None
            made.append(self._normalise(given, staged=staged))
            given = Inputs(self._scratch, given.size, given.tokens, staged=staged)
        beside = None
        if adapter is not None:
            beside = self._shrink_beside(given, weights, output, adapter)
            if beside is None:
                made += self._shrink_first(given, adapter)
        made.append(self._product(name, given, weights, output, adapter=adapter, beside=beside))
        return tuple(made)

    def _shrink_beside(
        self, given: Inputs, weights: Sequence[Weight], output: Output, adapter: Adapter
    ) -> ShrinkBlocks | None:
        """Plan the blocks of a product of few tokens that multiply by A; None: a launch does it."""
        if given.tokens > COLUMNS[0]:
            return None
        tiles = self._narrow_tiles(given, weights, output)
        ring = tiles.depth * tiles.eights * weights[0].form.eight_bytes
        return shrink_blocks(
            self._facts,
            adapter,
            tiles,
            matrices=len(weights),
            ring=ring,
            blocks=most_blocks(given.size),
        )

    def _shrink_first(self, given: Inputs, adapter: Adapter) -> tuple[Launch, ...]:
        if given.tokens > COLUMNS[0] and not given.gain:
            return (self._shrink.launch(given.address, adapter, given.size, given.tokens),)
        a = Weight(adapter.a, adapter.width, Form("bfloat16" if self._bfloat else "float16"))
        return self._launches("shrink", given, [a], Output(NUMBERS, adapter.shrunk))

    def _normalise(self, given: Inputs, *, staged: bool) -> Launch:
        config = NormConfig(self._bfloat, given.size, staged)
        function = self._kernel("gemm/normalise", "normalise", config)
        selected = given.selected
        arguments = NormArguments(
            given.address,
            given.gain,
            selected.last,
            self._scratch,
            given.tokens,
            given.size,
            selected.seq_len,
            selected.select_len,
            given.eps,
        )
        blocks = -(-given.tokens // _NORM_TOKENS)
        return Launch(function, (blocks, 1, 1), _NORM_THREADS, 0, arguments, "normalise")

    def _product(
        self,
        name: str,
        given: Inputs,
        weights: Sequence[Weight],
        output: Output,
        *,
        adapter: Adapter | None,
        beside: ShrinkBlocks | None,
    ) -> Launch:
        form = weights[0].form
        if any(weight.form != form for weight in weights):
            raise HearthError("internal", "the matrices of one product have one form")
        common = ProductConfig(
            self._bfloat,
            given.size,
            output.kind,
            len(weights),
            any(weight.bias for weight in weights),
            adapter is not None,
            form.bits,
            form.block,
            form.zeros,
        )
        chosen = None
        if given.staged:
            chosen = self._groups(given, weights, output, common)
        elif columns_for(given.tokens) is not None:
            chosen = self._narrow(given, weights, output, common, beside)
        chosen = chosen or self._wide(given, weights, common)
        arguments = product_arguments(given, weights, output, chosen.groups)
        few = self._rows == 1 and given.tokens <= COLUMNS[0] and adapter is None
        arguments.early = _REHEARSED if chosen.rehearsed else given.tokens == 1 or few
        if adapter is not None:
            mailbox, count = (self._mailbox.next(), beside.blocks) if beside else (None, 0)
            arguments.added = added_arguments(adapter, mailbox, count)
        function, blocks, shared, _, threads, apart, _ = chosen
        return Launch(function, blocks, threads, shared, arguments, name, apart)

    def _narrow_tiles(
        self, given: Inputs, weights: Sequence[Weight], output: Output
    ) -> NarrowTiles:
        return narrow_tiles(
            self._facts,
            _eights(weights),
            given.size,
            columns_for(given.tokens) or 0,
            paired=output.kind == GATED,
            normed=bool(given.gain),
            weight_bytes=weights[0].form.eight_bytes,
        )

    def _narrow(
        self,
        given: Inputs,
        weights: Sequence[Weight],
        output: Output,
        common: ProductConfig,
        beside: ShrinkBlocks | None,
    ) -> _Chosen | None:
        tiles = self._narrow_tiles(given, weights, output)
        if takes_many(tiles):
            return None
        repeated = tiles.groups > tiles.blocks
        shared, blocks = tiles.shared_bytes, tiles.blocks
        if beside is not None:
            shared = beside.shared_bytes
            blocks += beside.blocks
            if repeated:
                blocks = self._facts.multiprocessors
            common = common._replace(shrink_stages=beside.stages)
        shares = -(-given.tokens // tiles.columns)
        config = GemvConfig(
            common,
            tiles.columns,
            shares,
            tiles.eights,
            tiles.depth,
            tiles.token_stages,
            tiles.resident,
            repeated,
            normed=bool(given.gain),
            shared_bytes=shared,
        )
        padded = max(shared, tiles.shared_bytes + tiles.padding)
        function = self._kernel("gemm/gemv", "product", config, padded)
        if repeated or (given.tokens > 1 and beside is None):
            shared = padded
        rehearsed = (
            self._rows == given.tokens == 1
            and not common.added
            and weights[0].form.block == 0
            and is_rehearsed(self._facts, tiles, given.size)
        )
        return _Chosen(function, (blocks, shares, 1), shared, tiles.groups, rehearsed=rehearsed)

    def _wide(self, given: Inputs, weights: Sequence[Weight], common: ProductConfig) -> _Chosen:
        eights, form = _eights(weights), weights[0].form
        tiles = wide_tiles(self._facts, eights, given.size, given.tokens, form.eight_bytes)
        # True if every block has rows of one matrix, or one of gate and up in each eight.
        even = all(weight.rows % (8 * tiles.eights) == 0 for weight in weights[:-1])
        shared = tiles.shared_bytes
        even = even or common.output == GATED
        cluster = KernelAttribute(f"__cluster_dims__(1, 1, {tiles.split})" * (tiles.split > 1))
        config = TiledConfig(common, tiles, even, shared, cluster)
        function = self._kernel("gemm/tiled", "product", config, shared)
        blocks = (-(-eights // tiles.eights), -(-given.tokens // (8 * tiles.widths)), tiles.split)
        apart = common.output == RESIDUAL and tiles.split == 1 and given.tokens > _TOGETHER
        return _Chosen(function, blocks, shared, 0, tiles.threads, apart)

    def _group_tiles(
        self, given: Inputs, weights: Sequence[Weight], output: Output
    ) -> GroupTiles | None:
        if weights[0].form.bits != _ELEMENT_BITS:
            return None
        rows = tuple(weight.rows for weight in weights)
        gated = output.kind == GATED
        return group_tiles(self._facts, rows, given.size, given.tokens, gated=gated)

    def _groups(
        self,
        given: Inputs,
        weights: Sequence[Weight],
        output: Output,
        common: ProductConfig,
    ) -> _Chosen:
        tiles = self._group_tiles(given, weights, output)
        if tiles is None:
            raise HearthError("internal", "only products by groups of warps read staged tokens")
        shared = tiles.shared_bytes
        config = WgmmaConfig(common, tiles, output.staged, shared)
        function = self._kernel("gemm/wgmma", "product", config, shared)
        tokens, eights = -(-given.tokens // (8 * tiles.widths)), _eights(weights)
        apart = output.kind == RESIDUAL and tiles.shares == 1
        return _Chosen(
            function, (tokens, -(-eights // tiles.eights), 1), shared, 0, tiles.threads, apart
        )

    def _kernel(self, file: str, name: str, config: KernelConfig, shared: int = 0) -> Any:
        """The kernel of this configuration, which a step asks for again and again."""
        key = (file, config)
        if key not in self._functions:
            self._functions[key] = self._programs.kernel(file, name, config, shared)
        return self._functions[key]


def _eights(weights: Sequence[Weight]) -> int:
    return sum(-(-weight.rows // 8) for weight in weights)
