"""Small random EAGLE-3 drafts in the published format, and their forward pass in NumPy."""

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from hearth.runtime.config import RopeConfig
from hearth.runtime.export.draft_config import load_draft_config
from hearth.runtime.export.model_config import ModelConfig, load_model_config
from hearth.runtime.export.reference_pass import rope_tables

Array = NDArray[Any]
Form = Literal["none", "offset", "direct"]
_POSITIONS = 4096


def write_draft(
    base: Path,
    target: Path,
    *,
    form: Form = "none",
    vocabulary: int = 0,
    seed: int = 0,
    **fields: Any,
) -> Path:
    """Write a draft for the Hugging Face folder `base` into `target`, which is returned.

    With a `form` of `d2t` it has `vocabulary` tokens of its own. `fields` are put into config.json.
    """
    model, random = load_model_config(base), np.random.default_rng(seed)
    own = model.vocab_size if form == "none" else vocabulary
    tensors = _tensors(model, own, random)
    if form != "none":
        tensors |= _vocabulary(model.vocab_size, own, form, random)
    target.mkdir(parents=True)
    save_file(tensors, target / "model.safetensors")
    given = json.loads((base / "config.json").read_text())
    config = _config(given.get("text_config", given))
    config |= {"draft_vocab_size": own} | fields
    (target / "config.json").write_text(json.dumps(config))
    return target


class DraftReference:
    """A draft's forward pass in float64, without a cache: every token is given every time.

    `rope` are cosine and sine by position, those of text to begin with.
    """

    def __init__(self, draft: Path, base: Path) -> None:
        self._config = load_draft_config(draft, load_model_config(base))
        self._weights = {
            name.removesuffix(".weight"): np.asarray(value, np.float64)
            for name, value in load_file(draft / "model.safetensors").items()
        }
        self.rope = self._tables(self._config.model.rope)

    def forward(
        self, embeds: Array, base_hidden: Array, draft_hidden: Array, positions: Array, mask: Array
    ) -> tuple[Array, Array]:
        """Log-probabilities [T, draft vocabulary] and hidden states [T, H] of one row.

        `embeds` [T, H], `base_hidden` [T, 3H], `draft_hidden` [T, H], `positions` [T]; token i
        sees token j where `mask` [T, T] holds.
        """
        x = base_hidden @ self._weights["fc"].T + draft_hidden
        both = [
            self._normalise(embeds, "midlayer.input_layernorm"),
            self._normalise(x, "midlayer.hidden_norm"),
        ]
        x = x + self._attention(np.concatenate(both, -1), positions, mask)
        x = x + self._mlp(self._normalise(x, "midlayer.post_attention_layernorm"))
        logits = self._normalise(x, "norm") @ self._weights["lm_head"].T
        shifted = logits - logits.max(-1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)), x

    def _attention(self, both: Array, positions: Array, mask: Array) -> Array:
        model = self._config.model
        q = self._turn(self._heads(both, "q", model.num_attention_heads), positions)
        k = self._turn(self._heads(both, "k", model.num_kv_heads), positions)
        v = self._heads(both, "v", model.num_kv_heads)
        group = model.num_attention_heads // model.num_kv_heads
        k, v = np.repeat(k, group, 0), np.repeat(v, group, 0)
        scores = q @ k.transpose(0, 2, 1) * model.head_dim**-0.5
        scores = np.where(mask, scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        context = (shares / shares.sum(-1, keepdims=True)) @ v
        flat = context.transpose(1, 0, 2).reshape(len(both), -1)
        return np.asarray(flat @ self._weights["midlayer.self_attn.o_proj"].T)

    def _heads(self, x: Array, kind: str, count: int) -> Array:
        projected = x @ self._weights[f"midlayer.self_attn.{kind}_proj"].T
        return np.asarray(projected.reshape(len(x), count, -1).transpose(1, 0, 2))

    def _turn(self, heads: Array, positions: Array) -> Array:
        cos, sin = (table[positions] for table in self.rope)
        half = cos.shape[1]
        first, second, rest = np.split(heads, [half, 2 * half], -1)
        turned = (first * cos - second * sin, second * cos + first * sin, rest)
        return np.concatenate(turned, -1)

    def _mlp(self, x: Array) -> Array:
        gate, up, down = (self._weights[f"midlayer.mlp.{k}_proj"] for k in ("gate", "up", "down"))
        gated = x @ gate.T
        return np.asarray((gated / (1 + np.exp(-gated)) * (x @ up.T)) @ down.T)

    def _normalise(self, x: Array, name: str) -> Array:
        root = np.sqrt((x * x).mean(-1, keepdims=True) + self._config.model.rms_norm_eps)
        return np.asarray(x / root * self._weights[name])

    def _tables(self, rope: RopeConfig) -> tuple[Array, Array]:
        cos, sin = rope_tables(rope, self._config.model.rotary_dim, _POSITIONS)
        return cos.astype(np.float64), sin.astype(np.float64)


def _tensors(model: ModelConfig, own: int, random: np.random.Generator) -> dict[str, Array]:
    hidden, inner, taps = model.hidden_size, model.intermediate_size, 3
    shapes = {
        "fc": (hidden, taps * hidden),
        "midlayer.self_attn.q_proj": (model.query_size, 2 * hidden),
        "midlayer.self_attn.k_proj": (model.kv_size, 2 * hidden),
        "midlayer.self_attn.v_proj": (model.kv_size, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, model.query_size),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
        "lm_head": (own, hidden),
    }
    tensors: dict[str, Array] = {
        f"{name}.weight": (random.standard_normal(shape) * shape[1] ** -0.5).astype(np.float32)
        for name, shape in shapes.items()
    }
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    for name in (*(f"midlayer.{norm}" for norm in norms), "norm"):
        tensors[f"{name}.weight"] = random.uniform(0.5, 1.5, hidden).astype(np.float32)
    return tensors


def _vocabulary(full: int, own: int, form: Form, random: np.random.Generator) -> dict[str, Array]:
    ids = np.sort(random.choice(full, own, replace=False))
    marks = np.zeros(full, np.bool_)
    marks[ids] = True
    return {"d2t": ids - np.arange(own) if form == "offset" else ids, "t2d": marks}


def _config(base: dict[str, Any]) -> dict[str, Any]:
    kept = (
        "head_dim", "hidden_size", "intermediate_size", "max_position_embeddings",
        "num_attention_heads", "num_key_value_heads", "partial_rotary_factor", "rms_norm_eps",
        "rope_parameters", "rope_scaling", "rope_theta", "vocab_size", "torch_dtype",
    )  # fmt: skip
    return {name: base[name] for name in kept if name in base} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_act": "silu",
    }
