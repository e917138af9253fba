"""The EAGLE-3 draft: its module, its folder, the base that it reads, and its losses.

Parameters have their published names. Shapes: B rows, S history entries, A queries, C draft-fed
ancestors, H the hidden size.

The training-time test: the draft is trained on its own outputs, as it is used.
After Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test", 2025, sections 3.1 and 3.2: step 1 reads the base's hidden states, each later
step the draft's own output of the step before, one position on. It attends to the base-fed entries
up to its anchor and to the draft-fed entries between the anchor and itself, which is a diagonal of
the attention matrix for each earlier step. The published training code weighs step k by 0.8^k.
"""

import json
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from models.folder import CONFIG

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


def config_of(shape: DraftShape) -> dict[str, Any]:
    """Return the draft's config.json.

    The taps stand in it under both names that are in use, which name a layer by its output: the
    input of the next.
    """
    outputs = [tap - 1 for tap in TAPS]
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "attention_bias": False,
        "bos_token_id": CONFIG["bos_token_id"],
        "draft_vocab_size": shape.vocabulary,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": outputs, "use_aux_hidden_state": True},
        "eos_token_id": CONFIG["eos_token_id"],
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": CONFIG["max_position_embeddings"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": shape.heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": shape.kv_heads,
        "pad_token_id": CONFIG["pad_token_id"],
        "rms_norm_eps": shape.epsilon,
        "rope_scaling": None,
        "rope_theta": shape.theta,
        "target_hidden_size": shape.hidden,
        "target_layer_ids": outputs,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": CONFIG["vocab_size"],
    }


def write_draft(out: Path, draft: Draft) -> None:
    """Write the folder, with the weights in bfloat16."""
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config_of(draft.shape), indent=2) + "\n"
    (out / "config.json").write_text(text, encoding="utf-8")
    weights = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in draft.state_dict().items()
    }
    save_file(weights, out / "model.safetensors", {"format": "pt"})


def read_draft(folder: Path) -> Draft:
    """Return the draft of a folder, in float32."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    shape = DraftShape(
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        intermediate=config["intermediate_size"],
        vocabulary=config["draft_vocab_size"],
        theta=config["rope_theta"],
        epsilon=config["rms_norm_eps"],
    )
    draft = Draft(shape)
    draft.load_state_dict(load_file(folder / "model.safetensors"))
    return draft


class Reading(NamedTuple):
    """One forward pass: taps [B, S, 3H], the inputs of the tapped layers, and logits [B, S, V]."""

    taps: Tensor
    logits: Tensor


class Base:
    """A model folder with its weights frozen, in float32 until it is compiled."""

    def __init__(self, folder: Path, device: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
        self.model.requires_grad_(requires_grad=False)
        self.device = device
        self._short = False

    @property
    def embedding(self) -> Tensor:
        """Return the table of embeddings [V, H], which is the head as well."""
        return self.model.model.embed_tokens.weight

    def compile(self) -> None:
        """Compile the layers one by one, as they share one graph, and multiply in bfloat16."""
        self._short = True
        torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for each shape of a batch
        for layer in self.model.model.layers:
            layer.compile(dynamic=True)

    @torch.no_grad()  # type: ignore[untyped-decorator] # torch has no types here
    def read(self, ids: Tensor) -> Reading:
        """Return taps and logits of right-padded token ids [B, S]."""
        inner = self.model.model
        hidden = inner.embed_tokens(ids)
        position = torch.arange(ids.shape[1], device=ids.device)[None]
        rotary = inner.rotary_emb(hidden, position)
        taps = []
        with torch.autocast(self.device, torch.bfloat16, enabled=self._short):
            for index, layer in enumerate(inner.layers):
                if index in TAPS:
                    taps.append(hidden)
                hidden = layer(
                    hidden, attention_mask=None, position_ids=position, position_embeddings=rotary
                )
        logits = torch.nn.functional.linear(inner.norm(hidden.float()), self.embedding)
        return Reading(torch.cat(taps, -1).float(), logits)


DECAY: Final = 0.8


class Anchors(NamedTuple):
    """The last base-fed entries of drafts, [B, A], and how many tokens may follow each."""

    entry: Tensor
    room: Tensor


class Losses(NamedTuple):
    """The weighted loss, and by step how many tokens were right, and of how many."""

    loss: Tensor
    right: Tensor
    total: Tensor


def anchors_of(answers: Tensor) -> Anchors:
    """Return every entry whose token is of an answer [B, S] and not its last one.

    Entry p is token p + 1: a draft from it predicts token p + 2 first. Rows with fewer entries
    than the longest end with entries that have no room.
    """
    place = torch.arange(answers.shape[1] - 2, device=answers.device)
    stops = ~(answers[:, 1:-1] & answers[:, 2:])
    stop = torch.where(stops, place, len(place)).flip(1).cummin(1).values.flip(1)
    room = stop - place
    width = max(1, int((~stops).sum(1).max()))
    entry = stops.to(torch.int8).argsort(dim=1, stable=True)[:, :width]
    return Anchors(entry, room.gather(1, entry))


def at(values: Tensor, index: Tensor) -> Tensor:
    """Return the rows [B, A, ...] of values [B, S, ...] at an index [B, A]."""
    shape = (*index.shape, *values.shape[2:])
    return values.gather(1, index.reshape(*index.shape, *[1] * (values.ndim - 2)).expand(shape))


class Unrolled:
    """The draft over one batch: its history of base-fed entries, and step after step."""

    def __init__(self, draft: Draft, embedding: Tensor, ids: Tensor, taps: Tensor) -> None:
        self.draft = draft
        self.ids = ids
        self._embedding = embedding
        self._next = embedding[ids[:, 1:]]
        self._x = draft.fused(taps[:, :-1])
        position = torch.arange(ids.shape[1] - 1, device=ids.device)[None]
        self.history = draft.entries(self._next, self._x, position)

    def first(self, entry: Tensor) -> Tensor:
        """Return the outputs [B, A, H] of base-fed entries [B, A]."""
        query = Query(at(self._next, entry), at(self._x, entry), entry, entry)
        return self.draft.midlayer(query, self.history, None)

    def further(
        self, tokens: Tensor, x: Tensor, entry: Tensor, chain: Entries | None
    ) -> tuple[Tensor, Entries]:
        """Return the outputs of draft-fed tokens [B, A] and the chains with their entries.

        x [B, A, H] is the parents' outputs, `entry` the anchors, the chain that of the parents.
        """
        depth = 1 if chain is None else chain.keys.shape[2] + 1
        query = Query(self._embedding[tokens], x, entry + depth, entry)
        new = self.draft.entries(query.embedding, x, query.position)
        keys, values = (part[:, :, None] for part in new)
        if chain is not None:
            keys = torch.cat((chain.keys, keys), 2)
            values = torch.cat((chain.values, values), 2)
        chain = Entries(keys, values)
        return self.draft.midlayer(query, self.history, chain), chain


def losses_of(unrolled: Unrolled, teacher: Tensor, anchors: Anchors, steps: int) -> Losses:
    """Return the loss over these steps: cross entropy with the base's logits [B, S, V]."""
    ids = unrolled.ids
    entry, chain, hidden = anchors.entry, None, unrolled.first(anchors.entry)
    loss, right, total = hidden.new_zeros(()), [], []
    for step in range(steps):
        last = torch.clamp(entry + step + 1, max=ids.shape[1] - 1)
        if step:
            hidden, chain = unrolled.further(at(ids, last), hidden, entry, chain)
        wanted = anchors.room > step
        target = at(teacher, last)
        logits = unrolled.draft.logits(hidden).float()
        each = -(target.softmax(-1) * logits.log_softmax(-1)).sum(-1)
        count = wanted.sum()
        loss = loss + DECAY**step * (each * wanted).sum() / count.clamp(min=1)
        right.append((wanted & (logits.argmax(-1) == target.argmax(-1))).sum())
        total.append(count)
    return Losses(loss, torch.stack(right), torch.stack(total))
