"""The inputs of adapters: what they are called, and their shapes."""

from collections.abc import Collection
from typing import NamedTuple

from hearth.runtime.config import LORA_JOINED, LORA_TARGETS, LLMEngineRunnerConfig

RANK = "lora_rank"
"""[1] int32: how many columns of each target's A are there."""


class LoraInput(NamedTuple):
    """A pair of inputs of one layer, in the engine's type: x A B is added to a projection of x.

    A is [K, r] and B [r, N], where r is at most `rank`, the same for both; an engine whose rank is
    `fixed` takes that one alone, filled up with zeros. Where it joins several `targets`, A has
    theirs side by side and B has theirs along its diagonal, in that order: the rows of a target's B
    that belong to its columns of A, in the `columns` of its own.

    Kernels take both `transposed`, A as [r, K] and B, without what is beside the diagonal, as
    [N, r / targets].
    """

    a: str
    b: str
    layer: int
    targets: tuple[str, ...]
    inputs: int
    outputs: tuple[int, ...]
    rank: int
    fixed: bool
    transposed: bool = False

    @property
    def shape_a(self) -> tuple[int | str, int | str]:
        """K and r, a symbol where it is not fixed."""
        return (self.rank, self.inputs) if self.transposed else (self.inputs, self._rank)

    @property
    def shape_b(self) -> tuple[int | str, int | str]:
        """The symbol or number r, and N."""
        outputs = sum(self.outputs)
        if self.transposed:
            return outputs, self.rank // len(self.targets)
        return self._rank, outputs

    @property
    def numbers(self) -> int:
        """Number of elements of A and B at the greatest rank."""
        beside = self.rank // len(self.targets) if self.transposed else self.rank
        return self.rank * self.inputs + beside * sum(self.outputs)

    @property
    def columns(self) -> tuple[slice, ...]:
        """Slice of N of each of `targets`."""
        ends = [sum(self.outputs[: place + 1]) for place in range(len(self.outputs))]
        return tuple(slice(end - size, end) for end, size in zip(ends, self.outputs, strict=True))

    @property
    def _rank(self) -> int | str:
        # A symbol of its own: what shares one may be put into memory of one size.
        return self.rank if self.fixed else self.a.replace("_a_", "_rank_")


def lora_inputs(config: LLMEngineRunnerConfig) -> tuple[LoraInput, ...]:
    """Every pair of an engine, layer by layer; none of one without adapters.

    They are called `lora_a_{target}_{layer}` and `lora_b_{target}_{layer}`. Kernels also bind the
    rank of the active adapter, `RANK`.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_kv_heads))
    sizes = {"q": (hidden, q), "k": (hidden, kv), "v": (hidden, kv), "o": (q, hidden)}
    sizes |= {"gate": (hidden, inner), "up": (hidden, inner), "down": (inner, hidden)}
    found = []
    for layer in range(config.num_decoder_layers):
        for name in config.lora_targets:
            targets = LORA_JOINED.get(name, (name,))
            found.append(
                LoraInput(
                    a=f"lora_a_{name}_{layer}",
                    b=f"lora_b_{name}_{layer}",
                    layer=layer,
                    targets=targets,
                    inputs=sizes[targets[0]][0],
                    outputs=tuple(sizes[target][1] for target in targets),
                    rank=len(targets) * slot_rank(config),
                    fixed=has_fixed_rank(config),
                    transposed=config.backend == "kernels",
                )
            )
    return tuple(found)


def slot_rank(config: LLMEngineRunnerConfig) -> int:
    """Columns of A of a target at the greatest rank: kernels take sixteen at a time."""
    most = config.max_supported_lora_rank
    return -(-most // 16) * 16 if config.backend == "kernels" else most


def has_fixed_rank(config: LLMEngineRunnerConfig) -> bool:
    """Return True if adapters are bound at the greatest rank: in plans, and with captured steps."""
    return config.backend in {"kernels", "tensorrt"}


def lora_targets(config: LLMEngineRunnerConfig, asked: Collection[str] = ()) -> tuple[str, ...]:
    """Return the projections that the graph has adapter inputs for: those `asked` for, or all.

    Projections that are one product share their pair, as nodes cost more than the zeros beside the
    diagonal do, up to rank 16 on a CPU as well.
    """
    if not config.max_supported_lora_rank:
        return ()
    wanted = [one for one in LORA_TARGETS if one in (asked or LORA_TARGETS)]
    for joined, parts in LORA_JOINED.items():
        found = [one for one in wanted if one in parts]
        if found:
            first = wanted.index(found[0])
            wanted[first : first + len(found)] = [joined]
    return tuple(wanted)
