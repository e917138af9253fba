"""Launches of the rotation of a step's heads, their cache writes and attention (csrc/attention)."""

import ctypes
from functools import lru_cache
from typing import Any, NamedTuple

from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.device.cuda.compiler import KernelAttribute
from hearth.runtime.device.cuda.gpu_facts import GpuFacts
from hearth.runtime.device.cuda.launch import Launch, addresses, integers
from hearth.runtime.device.cuda.programs import Kernels

SPLIT = 64
"""Positions of a split."""
SPAN = 4
"""Splits of a span."""
_WARPS = 4
_THREADS = 32 * _WARPS
_TILE = 16
_HALF = 8
_WIDEST_BY_TWO = 128
"""Head dimension up to which two warps have the registers for a tile."""
_BLOCKS = 4
"""Blocks of a multiprocessor where positions are spread over blocks."""
_BLOCKS_OF_ROWS = 2
"""The same where rows have one token each."""
_CROWDED = 2
_MOST_FUSED_ROWS = 32
_CROWDED_BY_FEW = 0.75
_LEAST_PARTS = 4
_MOST_IN_CLUSTER = 4
"""Query rows of a token that a cluster merges."""
_FINE = 8
_FINEST = 64
_ELEMENT_BYTES = 2
_FLOAT_BYTES = 4
_SUM_BYTES = 8
_TICKET_BYTES = 4
_ALIGNMENT = 256
_HEADS_OF_WARP = 4
_HALF_BLOCK = 32
# Constants of nodes.cu: warps, query heads of a KV head, blocks of a multiprocessor, those beside
# each that take whole spans, slots up to which it is the shorter one, floats of a row of scores.
_NODE_WARPS = 8
_NODE_GROUPS = (1, 2, 4)
_NODE_BLOCKS = 2
_MOST_HELPERS = 7
_MOST_NODE_SLOTS = 2048
_SCORES = 72


class AttentionArguments(ctypes.Structure):
    """Arguments of `attend` and `rotate`, in the order of the source."""

    _fields_ = (
        *addresses(
            "qkv queries keys values start positions cos sin q_gain k_gain mask out partial sums "
            "tickets"
        ),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        *integers("batch seq_len kv_len table_rows units fine"),
    )


class HeadConfig(NamedTuple):
    """Members of `Config` common to all attention kernels: the heads of a model, and the GPU."""

    bfloat: bool
    dim: int
    rotary: int
    query_heads: int
    kv_heads: int
    early: bool


class AttentionConfig(NamedTuple):
    """`Config` of csrc/attention/attention.cu, whose comment says what a block does then.

    With `for_nodes` its `rotate` goes before csrc/attention/nodes.cu.
    """

    heads: HeadConfig
    share: int
    fused: bool = False
    single: bool = False
    halves: int = 2
    tree: bool = False
    whole: bool = False
    by_warp: bool = False
    lone: bool = False
    staged: bool = False
    for_nodes: bool = False
    clustered: bool = False
    cluster_dims: KernelAttribute = KernelAttribute()

    def in_clusters(self) -> "AttentionConfig":
        """The same on a GPU with clusters: blocks of a token are one, where they can be."""
        heads = self.heads
        few = heads.query_heads // heads.kv_heads <= _MOST_IN_CLUSTER and self.halves == 1
        each = (self.single or self.lone) and not self.whole
        if not (few and each and heads.dim <= _WIDEST_BY_TWO):
            return self
        dims = KernelAttribute(f"__cluster_dims__({SPAN})")
        return self._replace(clustered=True, cluster_dims=dims)


class NodesConfig(NamedTuple):
    """`Config` of csrc/attention/nodes.cu."""

    heads: HeadConfig
    shared_bytes: int


class AttentionShape(NamedTuple):
    """The sizes of a model that attention follows from."""

    head_dim: int
    query_heads: int
    kv_heads: int

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.query_heads // self.kv_heads


class AttentionPlan(NamedTuple):
    """Partition of a step's attention over blocks and warps; results do not depend on it.

    `share` warps have a tile of eight times `halves` query rows together. For each row and KV head
    there are `tiles` times `parts` blocks: a tile's positions are spread over `parts` blocks in
    units, which are splits where there are at most `fine` of them, else spans as far as these are
    full; the scratch holds `units`. Blocks of a `whole` step have all positions. Those of one that
    is `fused` rotate too, and there each token of a tree has units of its own from the row's start
    on. In one that is `paired` the last blocks have these, a token a warp. In one that is `lone`
    each token has blocks of its own where it sees few positions, as many as of a tile otherwise. A
    block of `nodes` has eight tokens, and the others of its `parts` whole spans; they take
    `shared_bytes`.
    """

    share: int
    tiles: int
    parts: int = 1
    fine: int = 0
    units: int = 1
    fused: bool = False
    whole: bool = False
    halves: int = 2
    paired: bool = False
    nodes: bool = False
    shared_bytes: int = 0
    lone: bool = False

    @property
    def rows(self) -> int:
        """Query rows of a block."""
        return _HALF * self.halves * _WARPS // self.share

    def tokens(self, group: int) -> int:
        """Tokens that have some of these rows, at most, `group` rows each."""
        return (self.rows + group - 2) // group + 1 if self.rows % group else self.rows // group


@lru_cache
def plan_attention(
    shape: AttentionShape,
    multiprocessors: int,
    batch: int,
    seq_len: int,
    kv_len: int,
    *,
    shared_per_block: int = 0,
) -> AttentionPlan:
    """Cut a step of `seq_len` tokens a row over caches of `kv_len` slots.

    Where `shared_per_block` is not said, blocks have no more than 48 KB of shared memory.
    """
    rows, pairs = seq_len * shape.group, batch * shape.kv_heads
    even = _HALF % shape.group == 0
    fused = rows <= _TILE or (even and rows <= _MOST_FUSED_ROWS and seq_len <= _TILE)
    halves = 1 if fused and (rows <= _HALF or even) else 2
    plan = AttentionPlan(_WARPS, -(-rows // (_HALF * halves)), fused=fused, halves=halves)
    blocks = -(-seq_len // _NODE_WARPS) * pairs
    if not fused and kv_len <= _MOST_NODE_SLOTS and blocks <= _NODE_BLOCKS * multiprocessors:
        helpers = max(1, min(_MOST_HELPERS, _BLOCKS * multiprocessors // blocks - 1))
        by_nodes = plan_nodes(shape, seq_len, kv_len, helpers)
        if by_nodes is not None and by_nodes.shared_bytes <= shared_per_block:
            return by_nodes
    splits, tokens = -(-kv_len // SPLIT), plan.tokens(shape.group) if seq_len > 1 else 0
    blocks = plan.tiles * pairs
    # With many rows each block has all positions of its tile.
    most = 1 if not fused else _CROWDED if seq_len == 1 else _CROWDED_BY_FEW
    if blocks >= most * multiprocessors:
        if not fused and shape.head_dim <= _WIDEST_BY_TWO:
            plan = plan._replace(share=_WARPS // 2, tiles=-(-rows // (2 * _TILE)))
        return plan._replace(whole=True)
    fine = min(splits, _FINEST if fused else _FINE)
    units = units_of(splits, fine, seq_len)
    paired = not fused and seq_len <= SPLIT and shape.head_dim <= _WIDEST_BY_TWO
    items = units + (-(-tokens // _WARPS) if paired else tokens)
    most = _BLOCKS_OF_ROWS if fused and seq_len == 1 < batch else _BLOCKS
    parts = min(items, max(_LEAST_PARTS + tokens, most * multiprocessors // blocks))
    merged = shape.group <= _MOST_IN_CLUSTER and shape.head_dim <= _WIDEST_BY_TWO and halves == 1
    lone = fused and merged and seq_len > 1 and pairs * seq_len <= multiprocessors
    return plan._replace(parts=parts, fine=fine, units=units, paired=paired, lone=lone)


def plan_nodes(
    shape: AttentionShape, seq_len: int, kv_len: int, helpers: int = 1
) -> AttentionPlan | None:
    """Plan a step for `nodes.cu`; None if that does not support it."""
    group, dim, spans = shape.group, shape.head_dim, kv_len // (SPLIT * SPAN)
    if group not in _NODE_GROUPS or dim > _WIDEST_BY_TWO or seq_len > SPLIT:
        return None
    # Its `Shared`: a window of two splits and one split, or sums in that one's place; the queries,
    # scores, sums of powers and paths.
    rows, tiled = _NODE_WARPS * group, max(_TILE, _NODE_WARPS * group)
    stride = dim * _ELEMENT_BYTES + 16
    split = max(2 * SPLIT * stride, rows * (dim + _HALF) * _FLOAT_BYTES)
    small = rows * (_SCORES * _FLOAT_BYTES + _SUM_BYTES) + _NODE_WARPS * 2 * SPLIT
    return AttentionPlan(
        share=_NODE_WARPS // group,
        tiles=-(-seq_len // _NODE_WARPS),
        parts=1 + min(helpers, spans),
        units=spans + 2,
        nodes=True,
        shared_bytes=4 * SPLIT * stride + split + tiled * stride + small,
    )


def units_of(splits: int, fine: int, seq_len: int) -> int:
    """Units at most of so many splits: spans, and splits that the tokens of a step may be in."""
    return min(splits, max(fine, splits // SPAN + SPAN - 1 + -(-seq_len // SPLIT)))


class Attention:
    """Attention of one model on one GPU.

    `eps` is that of the norms of heads, if the model has these: `qk_norm`.
    """

    def __init__(
        self,
        programs: Kernels,
        facts: GpuFacts,
        config: LLMEngineRunnerConfig,
        *,
        eps: float,
        qk_norm: bool,
    ) -> None:
        self._programs = programs
        self._multiprocessors = facts.multiprocessors
        self._shared_per_block = facts.shared_per_block
        self._eps, self._qk_norm = eps, qk_norm
        self._shape = AttentionShape(
            config.head_dim, config.num_attention_heads, config.num_kv_heads
        )
        own_tables = config.use_context_dependent_rope
        self._table_rows = config.max_kv_cache_capacity if own_tables else 0
        self._heads = HeadConfig(
            bfloat=config.dtype == "bfloat16",
            dim=config.head_dim,
            rotary=config.rotary_dim,
            query_heads=config.num_attention_heads,
            kv_heads=config.num_kv_heads,
            early=config.weight_quantization == "none",
        )
        self._has_clusters = facts.largest_cluster >= SPAN
        self._functions: dict[AttentionConfig | NodesConfig, tuple[Any, Any]] = {}
        self._scratch = self._tickets = 0

    def scratch_bytes(self, batch: int, seq_len: int, kv_len: int) -> int:
        """Bytes of memory that a step of these sizes uses; their contents do not matter."""
        return sum(self._parts_of_scratch(batch, seq_len, kv_len))

    def use_scratch(self, address: int) -> None:
        """Set the address of that memory for launches made from now on."""
        self._scratch = address

    def ticket_bytes(self, batch: int, seq_len: int, kv_len: int) -> int:
        """Bytes of counters, which must be zero once and belong to this object alone."""
        plan = self.plan(batch, seq_len, kv_len)
        tiles = 0 if plan.units == 1 else batch * plan.tiles * self._shape.kv_heads
        return tiles * plan.tokens(self._shape.group) * _TICKET_BYTES

    def use_tickets(self, address: int) -> None:
        """Set the address of the counters for launches made from now on."""
        self._tickets = address

    def plan(self, batch: int, seq_len: int, kv_len: int) -> AttentionPlan:
        """Plan a step of these sizes."""
        return plan_attention(
            self._shape,
            self._multiprocessors,
            batch,
            seq_len,
            kv_len,
            shared_per_block=self._shared_per_block,
        )

    def stages(self, mask: int, batch: int, seq_len: int, kv_len: int) -> bool:
        """Return True if the step can write its output in the stage layout of a product."""
        plan = self.plan(batch, seq_len, kv_len)
        halves = self._shape.head_dim % (_HALF_BLOCK * plan.share) == 0
        many = plan.whole and not plan.fused and not plan.nodes
        return many and mask == 0 and halves

    def launches(  # noqa: PLR0917 (as many inputs has the step)
        self,
        qkv: int,
        gains: tuple[int, int],
        caches: tuple[int, int],
        start: int,
        positions: int,
        rope: tuple[int, int],
        mask: int,
        out: int,
        batch: int,
        seq_len: int,
        kv_len: int,
        *,
        staged: bool = False,
    ) -> tuple[Launch, ...]:
        """Rotate qkv float32 [T, (Hq + 2 Hkv) D], write keys and values, attend: out [T, Hq D].

        T tokens are `batch` rows of `seq_len`. `gains` [D] are those of the norms of query and key
        heads, if there are any, `caches` keys and values [batch, Hkv, kv_len, D], `rope` cosines
        and sines [., R / 2], of each row if its tables are its own; `start` int64 [batch] and
        `positions` int64 [batch, seq_len]. `mask` is the packed mask int32 [batch, seq_len,
        ceil(seq_len / 32)], or 0 where each token sees all before it. The output may be `staged`,
        as csrc/common/staged.cuh says.
        """
        plan, shape = self.plan(batch, seq_len, kv_len), self._shape
        sizes = self._parts_of_scratch(batch, seq_len, kv_len)
        queries = self._scratch
        partial = queries + sizes[0]
        if not self._qk_norm:
            gains = (0, 0)
        arguments = AttentionArguments(
            qkv, queries, *caches, start, positions, *rope, *gains, mask, out,
            partial, partial + sizes[1], self._tickets,
            self._eps, shape.head_dim**-0.5,
            batch, seq_len, kv_len, self._table_rows, plan.units, plan.fine,
        )  # fmt: skip
        tree, single = mask != 0 and seq_len > 1, seq_len == 1
        rotate, attend = self._kernels(plan, tree=tree, single=single, staged=staged)
        parts, tiles = plan.parts, plan.tiles
        # Blocks of one token are clusters, where there are clusters; the first of all come first.
        if seq_len == 1 and plan.fused and not plan.whole:
            parts, tiles = SPAN, -(-parts // SPAN)
        elif plan.lone:
            parts, tiles = SPAN, seq_len * max(1, parts * tiles // (seq_len * SPAN))
        grid = (parts, shape.kv_heads, tiles * batch)
        attention = Launch(attend, grid, _THREADS, 0, arguments, "attend")
        if plan.nodes:
            grid = (plan.tiles, shape.kv_heads, plan.parts * batch)
            shared = plan.shared_bytes
            attention = Launch(attend, grid, 32 * _NODE_WARPS, shared, arguments, "attend")
        if plan.fused:
            return (attention,)
        heads = -(-(shape.query_heads + 2 * shape.kv_heads) // _HEADS_OF_WARP)
        grid = (-(-batch * seq_len * heads // _WARPS), 1, 1)
        return (Launch(rotate, grid, _THREADS, 0, arguments, "rotate"), attention)

    def _kernels(
        self, plan: AttentionPlan, *, tree: bool, single: bool, staged: bool
    ) -> tuple[Any, Any]:
        """The kernels `rotate` and `attend` for steps that are cut like this."""
        if plan.nodes:
            return self._node_kernels(plan)
        config = AttentionConfig(
            self._heads,
            share=plan.share,
            fused=plan.fused,
            single=single and plan.fused,
            halves=plan.halves,
            tree=tree,
            whole=plan.whole,
            by_warp=tree and plan.paired,
            lone=plan.lone,
            staged=staged,
        )
        if self._has_clusters:
            config = config.in_clusters()
        if config not in self._functions:
            self._functions[config] = (
                self._programs.kernel("attention/attention", "rotate", config),
                self._programs.kernel("attention/attention", "attend", config),
            )
        return self._functions[config]

    def _node_kernels(self, plan: AttentionPlan) -> tuple[Any, Any]:
        config = NodesConfig(self._heads, plan.shared_bytes)
        if config not in self._functions:
            before = AttentionConfig(self._heads, _WARPS, for_nodes=True)
            self._functions[config] = (
                self._programs.kernel("attention/attention", "rotate", before),
                self._programs.kernel("attention/nodes", "attend", config, plan.shared_bytes),
            )
        return self._functions[config]

    def _parts_of_scratch(self, batch: int, seq_len: int, kv_len: int) -> tuple[int, int, int]:
        """Bytes of rotated queries, of partial sums of values, and of their maxima and sums."""
        plan, shape = self.plan(batch, seq_len, kv_len), self._shape
        queries = 0 if plan.fused else batch * seq_len * shape.query_heads * shape.head_dim
        rows = min(plan.rows, seq_len * shape.group)
        sums = 0 if plan.units == 1 else batch * plan.tiles * shape.kv_heads * plan.units * rows
        return (
            _aligned(queries * _ELEMENT_BYTES),
            sums * shape.head_dim * _FLOAT_BYTES,
            sums * _SUM_BYTES,
        )


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT
