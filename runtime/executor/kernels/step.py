import ctypes
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from hearth.runtime.config import LORA_JOINED, DType, LLMEngineRunnerConfig
from hearth.runtime.device.cuda.gpu_facts import GpuFacts
from hearth.runtime.device.cuda.launch import Launch, addresses, integers
from hearth.runtime.device.cuda.programs import Kernels
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.engine import Binding, IOTensor
from hearth.runtime.executor.kernels.adapters import Adapter
from hearth.runtime.executor.kernels.attention import Attention
from hearth.runtime.executor.kernels.product_arguments import Weight, bound_weight, weight_forms
from hearth.runtime.executor.kernels.products import Products
from hearth.runtime.memory.sizes import ITEM_BYTES, ScratchPart, lay_out, step_parts
from hearth.runtime.tensors.lora import RANK
from hearth.runtime.tensors.tensor import numpy_dtype
from hearth.runtime.weights.weights_file import WeightLayout

Tap = tuple[int, int]
"""An address where the stream goes as elements too, and elements from a token to the next."""
_BLOCK = 128
_EIGHT = 8


class StreamArguments(ctypes.Structure):
    """Arguments of `csrc/decoder/enter.cu`; sizes in eighths: a thread takes eight elements."""

    _fields_ = (*addresses("source x tap cleared"), *integers("eighths width stride numbers"))


class StreamConfig(NamedTuple):
    """`Config` of csrc/decoder/enter.cu."""

    bfloat: bool


class ResidualStream:
    """Launches that begin the residual stream x [T, H] and add to it.

    Source: elements [T, H]; H is a multiple of 8.
    """

    def __init__(self, programs: Kernels, dtype: DType, hidden: int) -> None:
        config = StreamConfig(bfloat=dtype == "bfloat16")
        self._functions = {
            name: programs.kernel("decoder/enter", name, config) for name in ("begin", "add")
        }
        self._hidden = hidden

    def begin(
        self,
        source: int,
        x: int,
        tokens: int,
        tap: Tap | None = None,
        cleared: tuple[int, int] = (0, 0),
    ) -> Launch:
        """Let x be the elements at `source`.

        `cleared` is the address of the mailbox of x A to reset, and its number of elements.
        """
        return self._launch("begin", source, x, tokens, tap, cleared=cleared)

    def add(self, source: int, x: int, tokens: int, tap: Tap | None = None) -> Launch:
        """Add the elements at `source` to x."""
        return self._launch("add", source, x, tokens, tap)

    def _launch(
        self,
        name: str,
        source: int,
        x: int,
        tokens: int,
        tap: Tap | None,
        *,
        cleared: tuple[int, int] = (0, 0),
    ) -> Launch:
        to, stride = tap or (0, 0)
        width = self._hidden // _EIGHT
        eighths = tokens * width
        place, numbers = cleared
        stride //= _EIGHT
        arguments = StreamArguments(source, x, to, place, eighths, width, stride, numbers // 4)
        grid = (-(-eighths // _BLOCK), 1, 1)
        return Launch(self._functions[name], grid, _BLOCK, 0, arguments, name)


_KINDS = ("q", "k", "v", "o", "gate", "up", "down")


class StepShape(NamedTuple):
    """The sizes of a step: rows, tokens of each, slots of the caches, tokens that get logits."""

    batch: int
    seq_len: int
    kv_len: int
    select_len: int

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return self.batch * self.seq_len


class StepMemory(NamedTuple):
    """Bytes of scratch memory, and of counters that are zero between steps and never shared."""

    scratch: int
    tickets: int


class _Layer(NamedTuple):
    """The names of a layer's bindings."""

    caches: tuple[str, str]
    weights: dict[str, str]
    gains: dict[str, str]


class DecoderStep:
    """The launches of a decoder's steps, in order; see `docs/kernels.md`."""

    def __init__(
        self,
        config: LLMEngineRunnerConfig,
        layout: WeightLayout,
        io_tensors: Sequence[IOTensor],
        programs: Kernels,
        facts: GpuFacts,
    ) -> None:
        model = layout.model
        self._config, self._model, self._head = config, model, layout.head
        self._item = ITEM_BYTES[config.dtype]
        self._forms = weight_forms(io_tensors, config)
        self._stream = ResidualStream(programs, config.dtype, config.hidden_size)
        self._products = Products(programs, facts, numpy_dtype(config.dtype))
        self._attention = Attention(
            programs, facts, config, eps=model.rms_norm_eps, qk_norm=model.qk_norm
        )
        self._layers = [_layer(index) for index in range(config.num_decoder_layers)]
        self._offsets: dict[str, int] = {}
        self._most_tokens = self._most_partials = self._most_tickets = self._base = 0

    def provide(self, shapes: Iterable[StepShape]) -> StepMemory:
        """Provide for steps of at most these shapes; returns the memory that they need."""
        for shape in shapes:
            batch, seq_len, kv_len, _ = shape
            partials = self._attention.scratch_bytes(batch, seq_len, kv_len)
            self._most_partials = max(self._most_partials, partials)
            self._most_tokens = max(self._most_tokens, shape.tokens)
            tickets = self._attention.ticket_bytes(batch, seq_len, kv_len)
            self._most_tickets = max(self._most_tickets, tickets)
        layout = lay_out(self._parts())
        self._offsets = layout.offsets
        return StepMemory(layout.nbytes, self._most_tickets)

    def _parts(self) -> list[ScratchPart]:
        """Parts of the scratch memory with the launches that use them."""
        tokens = self._most_tokens
        normed = self._products.scratch_bytes(self._config.hidden_size, tokens)
        return step_parts(self._config, tokens, normed=normed, partials=self._most_partials)

    def use_scratch(self, address: int) -> None:
        """Keep values between the launches of coming steps in this scratch memory."""
        self._base = address

    def use_tickets(self, address: int) -> None:
        """Set the address of attention's counters, which are zero between steps."""
        self._attention.use_tickets(address)

    def launches(self, bindings: Sequence[Binding]) -> list[Launch]:
        """Make the launches of a step with these addresses and shapes."""
        config, model, products = self._config, self._model, self._products
        at = {one.name: one.tensor.address for one in bindings}
        shapes = {one.name: one.shape for one in bindings}
        shape = step_shape(shapes)
        batch, seq_len, kv_len, select_len = shape
        tokens, hidden, eps = shape.tokens, config.hidden_size, model.rms_norm_eps
        queries = config.num_attention_heads * config.head_dim
        place = self._places(shape)
        x = place["stream"]
        products.use_scratch(place["normed"], batch)
        self._attention.use_scratch(place["partials"])

        def adapter(target: str, layer: int) -> Adapter | None:
            name = f"{target}_{layer}"
            width, inputs = shapes.get(f"lora_a_{name}", (0, 0))
            if not width * inputs:
                return None
            targets = len(LORA_JOINED.get(target, (target,)))
            addresses = (at[f"lora_a_{name}"], at[f"lora_b_{name}"], at[RANK])
            return Adapter(*addresses, place["shrunk"], width, width // targets)

        # Without an adapter these have no columns.
        widths = [
            size[0] for name, size in shapes.items() if name.startswith("lora_a_") and size[1]
        ]
        cleared = products.use_mailbox(place["mailbox"], tokens, max(widths, default=0))
        made = [self._stream.begin(at["inputs_embeds"], x, tokens, self._tap(0, at), cleared)]
        for index, layer in enumerate(self._layers):
            q, k, v, o, gate, up, down = self._matrices(layer, at)
            made += products.normed(
                x,
                at.get(layer.gains["input"], 0),
                eps,
                (q, k, v),
                hidden,
                tokens,
                place["projected"],
                adapter=adapter("qkv", index),
            )
            own, mask = adapter("o", index), at.get("packed_mask", 0)
            staged = own is None and products.takes_stages(o, queries, tokens)
            staged = staged and self._attention.stages(mask, batch, seq_len, kv_len)
            made += self._attend(layer, shape, place, at, staged=staged)
            made += products.residual(
                place["attended"], o, queries, tokens, x, adapter=own, staged=staged
            )
            several, last = adapter("gate_up", index), adapter("down", index)
            staged = several is None and last is None
            staged = staged and products.stages(gate, up, down, hidden, tokens)
            made += products.gated(
                x,
                at.get(layer.gains["post"], 0),
                eps,
                gate,
                up,
                hidden,
                tokens,
                place["activations"],
                adapter=several,
                staged=staged,
            )
            stacked = index < config.num_deepstack_features
            tap = self._tap(index + 1, at)
            made += products.residual(
                place["activations"],
                down,
                config.intermediate_size,
                tokens,
                x,
                tap=None if stacked else tap,
                adapter=last,
                staged=staged,
            )
            if stacked:
                made.append(self._stream.add(at[f"deepstack_embeds_{index}"], x, tokens, tap))
        head = bound_weight(self._forms, self._head, at)
        sizes = (hidden, batch, seq_len, select_len)
        made += products.head(x, at["norm"], eps, head, *sizes, at["last_token_ids"], at["logits"])
        return made

    def _matrices(self, layer: _Layer, at: Mapping[str, int]) -> list[Weight]:
        """The matrices of a layer, in the order of `_KINDS`."""
        return [bound_weight(self._forms, layer.weights[kind], at) for kind in _KINDS]

    def _attend(
        self,
        layer: _Layer,
        shape: StepShape,
        place: Mapping[str, int],
        at: Mapping[str, int],
        *,
        staged: bool = False,
    ) -> tuple[Launch, ...]:
        """Make the launches of a layer from its projections to the output of attention."""
        return self._attention.launches(
            place["projected"],
            (at.get(layer.gains["q"], 0), at.get(layer.gains["k"], 0)),
            (at[layer.caches[0]], at[layer.caches[1]]),
            at["kvcache_start_index"],
            at["attention_pos_id"],
            (at["rope_cos"], at["rope_sin"]),
            at.get("packed_mask", 0),
            place["attended"],
            shape.batch,
            shape.seq_len,
            shape.kv_len,
            staged=staged,
        )

    def _places(self, shape: StepShape) -> dict[str, int]:
        """Return the address of each part of the scratch memory."""
        sizes = shape.batch, shape.seq_len, shape.kv_len
        needed = (
            (shape.tokens, self._most_tokens),
            (self._attention.scratch_bytes(*sizes), self._most_partials),
            (self._attention.ticket_bytes(*sizes), self._most_tickets),
        )
        if any(wanted > most for wanted, most in needed):
            raise HearthError("internal", f"nothing was provided for a step of {shape}")
        return {name: self._base + offset for name, offset in self._offsets.items()}

    def _tap(self, layer: int, at: Mapping[str, int]) -> Tap | None:
        """Return the address that the input of a layer is copied to, if a draft reads it."""
        taps, hidden = self._config.eagle_layers, self._config.hidden_size
        if layer not in taps:
            return None
        offset = taps.index(layer) * hidden * self._item
        return at["hidden_states"] + offset, len(taps) * hidden


def step_shape(shapes: Mapping[str, tuple[int, ...]]) -> StepShape:
    """The sizes of a step, from the shapes of its bindings."""
    batch, seq_len = shapes["attention_pos_id"]
    return StepShape(batch, seq_len, shapes["k_cache_0"][2], shapes["last_token_ids"][1])


def _layer(index: int) -> _Layer:
    name = f"layers.{index}"
    gains = {"input": "input_norm", "post": "post_norm", "q": "q_norm", "k": "k_norm"}
    return _Layer(
        (f"k_cache_{index}", f"v_cache_{index}"),
        {kind: f"{name}.{kind}" for kind in _KINDS},
        {kind: f"{name}.{gain}" for kind, gain in gains.items()},
    )
