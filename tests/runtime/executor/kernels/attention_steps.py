"""Rotation and attention in NumPy: what the kernels of `csrc/attention` must compute; and steps.

The NumPy forms have the same splits, spans and roundings, and differ in the order of the sums
within these. Arithmetic is float32; `dtype` is the engine's type, to which queries, keys, values
and the powers of scores are rounded. Steps are of attention alone, on a GPU and by these forms.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from hearth.runtime.config import DType
from hearth.runtime.device.cuda.cuda_device import CudaDevice
from hearth.runtime.device.cuda.gpu_facts import GpuFacts
from hearth.runtime.device.cuda.launch import Launcher
from hearth.runtime.device.cuda.programs import Programs, WantedKernels
from hearth.runtime.executor.kernels.attention import (
    SPAN,
    SPLIT,
    Attention,
    AttentionPlan,
    AttentionShape,
    plan_nodes,
    units_of,
)
from hearth.runtime.tensors.tensor import numpy_dtype
from tests.runtime.engine_configs import small_config

Array = NDArray[Any]
EPS = 1e-6
_TILE, _HALF = 16, 8
_SHARES = 4
_WIDEST_SHARED = 128
TABLE = 4096
POISON = 0xFF
"""Every number of these bytes is none."""


def rotated(
    raw: Array, gain: Array | None, eps: float, tables: tuple[Array, Array], scale: float
) -> Array:
    """Heads float32 [..., D] with their norm, their turn and a scale: a query's is D^-0.5.

    They are turned by cosines and sines [..., R / 2]. The result is not rounded yet.
    """
    heads = raw.astype(np.float32)
    if gain is not None:
        mean = np.mean(np.square(heads), axis=-1, keepdims=True)
        heads = heads / np.sqrt(mean + np.float32(eps)) * gain.astype(np.float32)
    cos, sin = tables
    half = cos.shape[-1]
    one, other, rest = np.split(heads, [half, 2 * half], axis=-1)
    turned = (one * cos - other * sin, other * cos + one * sin, rest)
    joined: Array = np.concatenate(turned, axis=-1) * np.float32(scale)
    return joined


class Sums(NamedTuple):
    """Partial sums over positions: the largest score m, sum l and sum of values o [D]."""

    m: np.float32
    l: np.float32  # noqa: E741 (as in the papers)
    o: Array

    def merged(self, following: "Sums") -> "Sums":
        """Merge with the sums of following positions; empty if both are."""
        m = max(self.m, following.m)
        if m == -np.inf:
            return self
        own, other = np.exp(self.m - m), np.exp(following.m - m)
        return Sums(m, self.l * own + following.l * other, self.o * own + following.o * other)


def seen_slots(start: int, token: int, packed: Array | None) -> list[int]:
    """The slots of the positions that a token of a step sees, in ascending order.

    `packed` int32 [words] is its row of the packed mask, None where it sees all before it.
    """
    if packed is None:
        return [*range(start + token + 1)]
    bits = np.unpackbits(packed.astype("<i4").view(np.uint8), bitorder="little")
    return [*range(start), *(start + np.flatnonzero(bits)).tolist()]


def attended(query: Array, keys: Array, values: Array, dtype: np.dtype[Any]) -> Array:
    """One query [D] over the keys and values [P, D] of its positions, float32 [D]."""
    nothing = Sums(np.float32(-np.inf), np.float32(0), np.zeros(len(query), np.float32))
    whole = nothing
    for first in range(0, len(keys), SPLIT * SPAN):
        span = nothing
        for begin in range(first, min(first + SPLIT * SPAN, len(keys)), SPLIT):
            scores = keys[begin : begin + SPLIT].astype(np.float32) @ query.astype(np.float32)
            m = scores.max()
            powers = np.exp(scores - m)
            rounded = powers.astype(dtype).astype(np.float32)
            o = rounded @ values[begin : begin + SPLIT].astype(np.float32)
            span = span.merged(Sums(m, powers.sum(), o))
        whole = whole.merged(span)
    return whole.o / whole.l if whole.l else whole.o


class Model(NamedTuple):
    """What attention knows of a model, and its gains and tables."""

    dtype: DType = "float16"
    query_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    rotary_dim: int = 64
    qk_norm: bool = True

    @property
    def heads(self) -> int:
        """Of queries, keys and values."""
        return self.query_heads + 2 * self.kv_heads

    @property
    def type(self) -> np.dtype[Any]:
        """Of elements."""
        return numpy_dtype(self.dtype)

    def gains(self) -> tuple[Array, Array] | tuple[None, None]:
        """Of the norms of queries and keys [D]."""
        if not self.qk_norm:
            return None, None
        drawn = np.random.default_rng(5).normal(1.3, 0.3, (2, self.head_dim)).astype(self.type)
        return drawn[0], drawn[1]

    def tables(self) -> tuple[Array, Array]:
        """Cosines and sines [TABLE, R / 2]."""
        powers = np.arange(self.rotary_dim // 2) / (self.rotary_dim // 2)
        angles = np.arange(TABLE)[:, None] * 10_000.0**-powers
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


class Step(NamedTuple):
    """The inputs of one: qkv [B, S, heads, D], caches [B, Hkv, slots, D], start [B]."""

    qkv: Array
    keys: Array
    values: Array
    start: Array
    positions: Array
    mask: Array | None = None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Rows, tokens a row, slots."""
        return (*self.positions.shape, self.keys.shape[2])


class Result(NamedTuple):
    """What attention gives [B, S, Hq, D], and the caches behind it."""

    out: Array
    keys: Array
    values: Array


def random_tokens(model: Model, count: int, seed: int = 0) -> Array:
    """Projections float32 [count, heads, D]."""
    shape = (count, model.heads, model.head_dim)
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def empty_caches(model: Model, batch: int, slots: int) -> tuple[Array, Array]:
    """Keys and values in which every number is none."""
    shape = (batch, model.kv_heads, slots, model.head_dim)
    return (np.full(shape, np.nan, model.type), np.full(shape, np.nan, model.type))


def formed(model: Model, step: Step) -> Result:
    """The step by the NumPy forms."""
    batch, seq_len, _ = step.sizes
    cos, sin = (table[step.positions][:, :, None] for table in model.tables())
    tables = (cos, sin)
    gains, queries = model.gains(), model.query_heads
    fresh = model.heads - model.kv_heads
    q = rotated(step.qkv[:, :, :queries], gains[0], EPS, tables, model.head_dim**-0.5)
    k = rotated(step.qkv[:, :, queries:fresh], gains[1], EPS, tables, 1)
    keys, values = step.keys.copy(), step.values.copy()
    for row in range(batch):
        slots = slice(int(step.start[row]), int(step.start[row]) + seq_len)
        keys[row, :, slots] = k[row].astype(model.type).swapaxes(0, 1)
        values[row, :, slots] = step.qkv[row, :, fresh:].astype(model.type).swapaxes(0, 1)
    out = np.zeros((batch, seq_len, queries, model.head_dim), np.float32)
    q = q.astype(model.type)
    for row, token in np.ndindex(batch, seq_len):
        packed = None if step.mask is None else step.mask[row, token]
        seen = seen_slots(int(step.start[row]), token, packed)
        for head in range(queries):
            of = (row, head // (queries // model.kv_heads), seen)
            out[row, token, head] = attended(q[row, token, head], keys[of], values[of], model.type)
    return Result(out.astype(model.type), keys, values)


class Bench:
    """Attention of a model on a GPU; `plan` overrides how a step is cut."""

    def __init__(self, gpu: CudaDevice, programs: Programs, model: Model) -> None:
        self.gpu, self.model = gpu, model
        self._driver = gpu.context.driver
        self._programs = programs
        self._facts = facts = GpuFacts.of(gpu.context)
        self._config = config = structs.replace(
            small_config(),
            dtype=model.dtype,
            kv_cache_dtype=model.dtype,
            num_attention_heads=model.query_heads,
            num_kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            rotary_dim=model.rotary_dim,
        )
        self.attention = PlannedAttention(programs, facts, config, eps=EPS, qk_norm=model.qk_norm)
        self.launcher = Launcher(gpu.context, dependent=facts.dependent)

    def prepare(
        self, plans: Sequence[AttentionPlan | None], seq_len: int, *, tree: bool = False
    ) -> None:
        """Compile what steps of so many tokens need, several at a time."""
        wanted = WantedKernels()
        attention = PlannedAttention(
            wanted, self._facts, self._config, eps=EPS, qk_norm=self.model.qk_norm
        )
        for attention.forced in plans:
            attention.launches(0, (0, 0), (0, 0), 0, 0, (0, 0), int(tree), 0, 1, seq_len, 448)
        self._programs.load(wanted.requests, threads=16)

    def run(self, step: Step, plan: AttentionPlan | None = None) -> Result:
        """What the kernels make of it, from poisoned scratch memory and output."""
        model, attention, sizes = self.model, self.attention, step.sizes
        batch, seq_len, _ = sizes
        attention.forced = plan
        cos, sin = model.tables()
        gains = model.gains()
        out = np.zeros((batch, seq_len, model.query_heads, model.head_dim), model.type)
        with self.memory() as memory:
            put = memory.put
            attention.use_scratch(memory.poison(attention.scratch_bytes(*sizes)))
            tickets = np.zeros(attention.ticket_bytes(*sizes) + 4, np.uint8)
            counters = put(tickets)
            attention.use_tickets(counters)
            caches = put(step.keys), put(step.values)
            target = memory.poison(out.nbytes)
            launches = attention.launches(
                put(step.qkv),
                (0, 0) if gains[0] is None else (put(gains[0]), put(gains[1])),
                caches,
                put(step.start.astype(np.int64)),
                put(step.positions.astype(np.int64)),
                (put(cos), put(sin)),
                0 if step.mask is None else put(step.mask),
                target,
                *sizes,
            )
            # Copies from ordinary memory may still be on their way, and no stream waits for them.
            self._driver.call("cuCtxSynchronize")
            self.launcher.pack(launches).queue(self.gpu.stream)
            self.gpu.stream.synchronize()
            memory.get(target, out)
            result = Result(out, np.empty_like(step.keys), np.empty_like(step.values))
            memory.get(caches[0], result.keys)
            memory.get(caches[1], result.values)
            memory.get(counters, tickets)
        if tickets.any():
            raise AssertionError(f"tickets are left: {tickets.view(np.uint32)}")
        return result

    @contextmanager
    def memory(self) -> "Iterator[Memory]":
        """Memory of the GPU that is freed when the block ends."""
        memory = Memory(self._driver)
        try:
            yield memory
        finally:
            memory.close()


class Memory:
    """Allocations of a GPU."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._addresses: list[int] = []

    def take(self, nbytes: int) -> int:
        """The address of so many bytes."""
        address = int(self._driver.call("cuMemAlloc", max(nbytes, 1)))
        self._addresses.append(address)
        return address

    def poison(self, nbytes: int) -> int:
        """Likewise, filled."""
        address = self.take(nbytes)
        self._driver.call("cuMemsetD8", address, POISON, max(nbytes, 1))
        return address

    def put(self, array: Array) -> int:
        """The address of a copy."""
        data = np.ascontiguousarray(array)
        address = self.take(data.nbytes)
        self._driver.call("cuMemcpyHtoD", address, data.ctypes.data, data.nbytes)
        return address

    def get(self, address: int, out: Array) -> None:
        """Copy to the host."""
        self._driver.call("cuMemcpyDtoH", out.ctypes.data, address, out.nbytes)

    def close(self) -> None:
        """Free everything."""
        while self._addresses:
            self._driver.call("cuMemFree", self._addresses.pop())


class PlannedAttention(Attention):
    """Attention whose steps can be cut as a test wants."""

    forced: AttentionPlan | None = None

    def plan(self, batch: int, seq_len: int, kv_len: int) -> AttentionPlan:
        """The forced plan, or that of every step."""
        return self.forced or super().plan(batch, seq_len, kv_len)


def other_plans(shape: AttentionShape, seq_len: int, slots: int) -> list[AttentionPlan]:
    """Every way to cut a step."""
    rows, splits = seq_len * shape.group, -(-slots // SPLIT)
    plans = []
    for share in (2, _SHARES) if shape.head_dim <= _WIDEST_SHARED else (4,):
        cut = AttentionPlan(share, -(-rows * share // 64))
        plans.append(cut._replace(whole=True))
        for parts, fine in ((1, 0), (3, 3), (40, splits)):
            units = units_of(splits, fine, seq_len)
            plans.append(cut._replace(parts=parts, fine=fine, units=units))
    if shape.head_dim <= _WIDEST_SHARED and seq_len <= SPLIT:
        spread = [one for one in plans if one.share == _SHARES and not one.whole]
        groups = -(-spread[0].tokens(shape.group) // 4)
        plans += [one._replace(paired=True, parts=one.parts + groups) for one in spread]
    by_nodes = plan_nodes(shape, seq_len, slots)
    if by_nodes is not None and rows > _TILE:
        plans.append(by_nodes)
    if rows <= _TILE:
        few = [one._replace(fused=True) for one in plans if one.share == _SHARES and not one.paired]
        narrow = [one._replace(tiles=-(-rows // 8), halves=1) for one in few]
        plans += narrow if rows <= _HALF else few + narrow if seq_len > 1 else few
        if seq_len > 1 and shape.group <= _SHARES and shape.head_dim <= _WIDEST_SHARED:
            lone = [one for one in narrow if not one.whole]
            plans += [one._replace(lone=True) for one in lone]
    return plans
