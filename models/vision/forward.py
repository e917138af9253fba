"""The forward pass of training, and its losses: pictures of one size at once.

It computes what transformers' Qwen3-VL does, which takes one picture after the other. The losses
are of the answers, and of the things at each merged patch.
"""

from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import Qwen3VLForConditionalGeneration

from models.vision.drawing import CLASSES
from models.vision.stream import Batch

PATCH: Final = 16
MERGE: Final = 2

_functional = nn.functional


def patches(pixels: Tensor) -> Tensor:
    """Return uint8 pixels [M, H, W, 3] as scaled patches [M, T, 3 * 16 * 16] in merge order."""
    pictures, height, width, _ = pixels.shape
    rows, columns = height // PATCH // MERGE, width // PATCH // MERGE
    cut = pixels.view(pictures, rows, MERGE, PATCH, columns, MERGE, PATCH, 3)
    cut = cut.permute(0, 1, 4, 2, 5, 7, 3, 6).reshape(pictures, -1, 3 * PATCH * PATCH)
    return cut.float() / 127.5 - 1


def merge_order(rows: int, columns: int) -> Tensor:
    """Return row and column [T, 2] of every patch in merge order."""
    place = torch.stack(
        torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"), -1
    )
    place = place.view(rows // MERGE, MERGE, columns // MERGE, MERGE, 2)
    return place.permute(0, 2, 1, 3, 4).reshape(-1, 2)


class Block(nn.Module):  # type: ignore[misc] # torch has no types here
    """A block of the tower over pictures of one size: [M, T, H] in and out."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend within each picture, and pass through the MLP."""
        block, attention = self.block, self.block.attn
        pictures, tokens, width = hidden.shape
        qkv = attention.qkv(block.norm1(hidden))
        q, k, v = qkv.view(pictures, tokens, 3, attention.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k = _turn(q, cos, sin).to(v.dtype), _turn(k, cos, sin).to(v.dtype)
        mixed = _functional.scaled_dot_product_attention(q, k, v)
        hidden = hidden + attention.proj(mixed.transpose(1, 2).reshape(pictures, tokens, width))
        return hidden + block.mlp(block.norm2(hidden))


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Reader(nn.Module):  # type: ignore[misc] # torch has no types here
    """The model as training runs it."""

    def __init__(self, model: Qwen3VLForConditionalGeneration) -> None:
        super().__init__()
        self.model = model
        self.tower = model.model.visual
        self.decoder = model.model.language_model
        self.blocks = nn.ModuleList(Block(block) for block in self.tower.blocks)
        self._tables: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        self.eager = False  # an exam has shapes of its own, not worth a graph

    def _run(self, layer: nn.Module, *inputs: Tensor, **names: Any) -> Tensor:
        found: Tensor = layer.forward(*inputs, **names) if self.eager else layer(*inputs, **names)
        return found

    def compile_layers(self) -> None:
        """Compile the layers one by one: they share one graph for each shape."""
        torch._dynamo.config.suppress_errors = True  # noqa: SLF001 - a slow layer is better than none
        torch._dynamo.config.recompile_limit = 64  # noqa: SLF001 - the documented name
        torch.backends.cuda.enable_cudnn_sdp(False)
        for block in self.blocks:
            block.compile(dynamic=False)
        for layer in self.decoder.layers:
            layer.compile(dynamic=True)

    def _table(self, rows: int, columns: int, device: torch.device) -> tuple[Tensor, ...]:
        key = (rows, columns)
        if key not in self._tables:
            side = self.tower.num_grid_per_side
            place = merge_order(rows, columns)
            spots = []
            for axis, size in enumerate((rows, columns)):
                line = torch.linspace(0, side - 1, size)[place[:, axis]]
                low = line.long()
                spots.append((low, (low + 1).clamp(max=side - 1), line - low))
            (top, bottom, down), (left, right, across) = spots
            index = torch.stack([r * side + c for r in (top, bottom) for c in (left, right)], 1)
            shares = [(1 - down) * (1 - across), (1 - down) * across, down * (1 - across)]
            weight = torch.stack([*shares, down * across], 1)
            quarter = self.tower.config.hidden_size // self.tower.config.num_heads // 4
            inverse = 10000.0 ** (-torch.arange(quarter) / quarter)
            angles = (place[:, :, None] * inverse).flatten(1).repeat(1, 2)
            tables = (index, weight, angles.cos(), angles.sin())
            self._tables[key] = tuple(table.to(device) for table in tables)
        return self._tables[key]

    def look(self, pixels: Tensor) -> list[Tensor]:
        """Return merged embeddings and deepstack features, each [M * T / 4, H], of pictures."""
        tower = self.tower
        rows, columns = pixels.shape[1] // PATCH, pixels.shape[2] // PATCH
        index, weight, cos, sin = self._table(rows, columns, pixels.device)
        projection = tower.patch_embed.proj
        matrix = projection.weight.sum(2).flatten(1)  # both frames of a picture are the same
        hidden = _functional.linear(patches(pixels), matrix, projection.bias)
        hidden = hidden + (tower.pos_embed(index) * weight[:, :, None]).sum(1)
        found: list[Tensor] = []
        for number, block in enumerate(self.blocks):
            hidden = self._run(block, hidden, cos, sin)
            if number in tower.deepstack_visual_indexes:
                found.append(tower.deepstack_merger_list[len(found)](hidden))
        return [tower.merger(hidden), *found]

    def read(self, ids: Tensor, positions: Tensor, features: list[Tensor], where: Tensor) -> Tensor:
        """Return hidden states of ids [B, S] at positions [3, B, S], features put in at `where`.

        `where` are the places of image tokens in the flattened ids; empty features are text.
        """
        shape = (*ids.shape, self.decoder.config.hidden_size)
        table = self.decoder.embed_tokens.weight  # the gradient of a selection needs no sorting
        hidden = table.index_select(0, ids.flatten()).view(shape)
        if features:
            merged = features[0].to(hidden.dtype)
            hidden = hidden.flatten(0, 1).index_copy(0, where, merged).view(shape)
        rotary = self.decoder.rotary_emb(hidden, positions)
        for number, layer in enumerate(self.decoder.layers):
            hidden = self._run(layer, hidden, position_embeddings=rotary, attention_mask=None)
            if number + 1 < len(features):
                deep = features[number + 1].to(hidden.dtype)
                hidden = hidden.flatten(0, 1).index_add(0, where, deep).view(shape)
        return self.decoder.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states, in float32."""
        return self.model.lm_head(hidden).float()


DROPPED: Final = 0.15  # pictures whose merged embeddings are left out: deepstack has to tell
NOTHING_SEEN: Final = 0.15  # weight of places where there is nothing
_UNASKED: Final = -100
_FIELDS: Final = 2  # the merged embeddings are asked for kind and colour alone


class Guide(nn.Module):  # type: ignore[misc] # torch has no types here
    """Auxiliary heads that classify each merged patch; they are used in training alone."""

    def __init__(self, width: int, features: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(
            nn.Linear(width, sum(CLASSES if index else CLASSES[:_FIELDS]))
            for index in range(features)
        )
        for field, number in enumerate(CLASSES):
            weight = torch.ones(number)
            weight[0] = NOTHING_SEEN
            self.register_buffer(f"weight{field}", weight)

    def forward(self, features: list[Tensor], seen: Tensor) -> Tensor:
        """Return the mean loss over heads and fields; `seen` [tokens, 6]."""
        losses = []
        for index, (head, feature) in enumerate(zip(self.heads, features, strict=True)):
            classes = CLASSES if index else CLASSES[:_FIELDS]
            for field, part in enumerate(head(feature).float().split(classes, -1)):
                weight = getattr(self, f"weight{field}")
                losses.append(_functional.cross_entropy(part, seen[:, field].long(), weight))
        return torch.stack(losses).mean()


def _answer_loss(reader: Reader, hidden: Tensor, batch: Batch) -> Tensor:
    wanted = batch["ids"][:, 1:].masked_fill(~batch["answers"][:, 1:], _UNASKED)
    logits = reader.logits(hidden[:, :-1]).flatten(0, 1)
    return _functional.cross_entropy(logits, wanted.flatten(), ignore_index=_UNASKED)


def picture_losses(reader: Reader, guide: Guide, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the mean loss over the tokens of answers about pictures, and that of the guide."""
    features = [part.flatten(0, -2) for part in reader.look(batch["pixels"])]
    guided = guide(features, batch["seen"].flatten(0, 1))
    pictures = len(batch["pixels"])
    main = features[0].view(pictures, -1, features[0].shape[-1])
    kept = torch.rand(pictures, 1, 1, device=main.device) >= DROPPED
    features[0] = (main * kept).flatten(0, 1)
    hidden = reader.read(batch["ids"], batch["positions"], features, batch["where"])
    return _answer_loss(reader, hidden, batch), guided


def text_loss(reader: Reader, batch: Batch) -> Tensor:
    """Return the mean loss over the tokens of answers in conversations without a picture."""
    line = torch.arange(batch["ids"].shape[1], device=batch["ids"].device)
    hidden = reader.read(batch["ids"], line.expand(3, 1, -1), [], line)
    return _answer_loss(reader, hidden, batch)
