"""The EAGLE-3 draft as a PyTorch module, its parameters under their published names.

Shapes: B rows, S history entries, A queries, C draft-fed ancestors, H the hidden size.
"""

from typing import Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

TAPS: Final = (2, 6, 9)


class DraftShape(NamedTuple):
    """The sizes of a draft; hidden, vocabulary and rotary base are those of the base model."""

    hidden: int = 192
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    intermediate: int = 384
    vocabulary: int = 1024
    theta: float = 10000.0
    epsilon: float = 1e-6


class Entries(NamedTuple):
    """Keys and values: [B, S, kv, D] of the history or [B, A, C, kv, D] of each query's chain."""

    keys: Tensor
    values: Tensor


class Query(NamedTuple):
    """Entries that the draft reads next: embedding and x [B, A, H], position, last history entry.

    The history is visible up to `anchor` [B, A], inclusive.
    """

    embedding: Tensor
    x: Tensor
    position: Tensor
    anchor: Tensor


class Norm(nn.Module):  # type: ignore[misc] # torch has no types here
    """A root mean square norm, computed in float32."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed x, in float32."""
        return functional.rms_norm(x.float(), self.weight.shape, self.weight, self.epsilon)


def _linear(wide: int, out: int) -> nn.Linear:
    return nn.Linear(wide, out, bias=False)


def rotate(x: Tensor, position: Tensor, theta: float) -> Tensor:
    """Return x [B, A, heads, D] turned by its position [B, A], half by half as in Llama."""
    half = x.shape[-1] // 2
    steps = torch.arange(half, device=x.device, dtype=torch.float32) / half
    angle = position[..., None, None].float() * theta**-steps
    low, high = x.float().split(half, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1).to(x.dtype)


class Attention(nn.Module):  # type: ignore[misc] # torch has no types here
    """Grouped attention whose queries, keys and values read 2H values and write H."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.shape = shape
        wide = 2 * shape.hidden
        self.q_proj = _linear(wide, shape.heads * shape.head_dim)
        self.k_proj = _linear(wide, shape.kv_heads * shape.head_dim)
        self.v_proj = _linear(wide, shape.kv_heads * shape.head_dim)
        self.o_proj = _linear(shape.heads * shape.head_dim, shape.hidden)

    def entries(self, inputs: Tensor, position: Tensor) -> Entries:
        """Return the keys and values of these inputs [B, S, 2H]."""
        heads = (self.shape.kv_heads, self.shape.head_dim)
        keys = self.k_proj(inputs).unflatten(-1, heads)
        values = self.v_proj(inputs).unflatten(-1, heads)
        return Entries(rotate(keys, position, self.shape.theta), values)

    def forward(self, inputs: Tensor, at: Query, history: Entries, chain: Entries | None) -> Tensor:
        """Return what the queries [B, A, 2H] read in the history and in their own chains."""
        shape = self.shape
        q = self.q_proj(inputs).unflatten(-1, (shape.heads, shape.head_dim))
        q = rotate(q, at.position, shape.theta) * shape.head_dim**-0.5
        q = q.unflatten(2, (shape.kv_heads, -1))
        scores = torch.einsum("bakgd,bskd->bkgas", q, history.keys)
        entry = torch.arange(scores.shape[-1], device=q.device)
        hidden = entry > at.anchor[..., None]
        scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
        if chain is not None:
            own = torch.einsum("bakgd,backd->bkgac", q, chain.keys)
            scores = torch.cat((scores, own), -1)
        weights = scores.softmax(-1, dtype=torch.float32).to(history.values.dtype)
        size = history.values.shape[1]
        out = torch.einsum("bkgas,bskd->bakgd", weights[..., :size], history.values)
        if chain is not None:
            out = out + torch.einsum("bkgac,backd->bakgd", weights[..., size:], chain.values)
        return self.o_proj(out.flatten(2))


class Mlp(nn.Module):  # type: ignore[misc] # torch has no types here
    """The gated SiLU network of Llama."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.gate_proj = _linear(shape.hidden, shape.intermediate)
        self.up_proj = _linear(shape.hidden, shape.intermediate)
        self.down_proj = _linear(shape.intermediate, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Return the network's output [B, A, H]."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Midlayer(nn.Module):  # type: ignore[misc] # torch has no types here
    """The one decoder layer: its attention reads the normed embedding beside the normed x."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)
        self.hidden_norm = Norm(shape.hidden, shape.epsilon)
        self.input_layernorm = Norm(shape.hidden, shape.epsilon)
        self.post_attention_layernorm = Norm(shape.hidden, shape.epsilon)

    def inputs(self, embedding: Tensor, x: Tensor) -> Tensor:
        """Return what queries, keys and values read, [B, A, 2H]."""
        return torch.cat((self.input_layernorm(embedding), self.hidden_norm(x)), -1)

    def forward(self, at: Query, history: Entries, chain: Entries | None) -> Tensor:
        """Return the un-normed output [B, A, H]; a chain ends with the query's own entry."""
        inputs = self.inputs(at.embedding, at.x)
        x = at.x + self.self_attn(inputs, at, history, chain)
        return x + self.mlp(self.post_attention_layernorm(x))


class Draft(nn.Module):  # type: ignore[misc] # torch has no types here
    """An EAGLE-3 draft; the embedding is the base's and no parameter of it.

    The form is that of Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language
    Models via Training-Time Test", 2025, section 3, and of its published checkpoints.
    """

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = _linear(len(TAPS) * shape.hidden, shape.hidden)
        self.midlayer = Midlayer(shape)
        self.norm = Norm(shape.hidden, shape.epsilon)
        self.lm_head = _linear(shape.hidden, shape.vocabulary)

    def fused(self, taps: Tensor) -> Tensor:
        """Return x [B, S, H] of base-fed entries from the taps [B, S, 3H]."""
        return self.fc(taps).float()

    def entries(self, embedding: Tensor, x: Tensor, position: Tensor) -> Entries:
        """Return the keys and values of entries at these positions [B, S]."""
        return self.midlayer.self_attn.entries(self.midlayer.inputs(embedding, x), position)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits over the vocabulary of un-normed outputs [B, A, H]."""
        return self.lm_head(self.norm(hidden))
