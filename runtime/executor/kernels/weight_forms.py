from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from hearth.runtime.config import DType, LLMEngineRunnerConfig
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.engine import IOTensor
from hearth.runtime.executor.kernels.products import Form, Weight

_INTEGERS = np.dtype(np.uint8)


class WeightForm(NamedTuple):
    """A matrix of an engine: its output rows, how they are stored, and what belongs to it."""

    rows: int
    form: Form
    scale: str
    zero: str
    bias: str


def weight_forms(
    io_tensors: Sequence[IOTensor], config: LLMEngineRunnerConfig
) -> dict[str, WeightForm]:
    """The matrices among an engine's bindings, by name.

    Raises `engine_incompatible` naming one that kernels of the engine's type do not read, or whose
    rows are not those that `config` says.
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
