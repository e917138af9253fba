"""The frozen base model as a draft sees it: its taps, its embedding and its distribution."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from models.draft_model import TAPS


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
