"""Rows with an image, and the logits that transformers gives for them in float32.

The models are those of `tests.vision_models`; embeddings and features of the image are random.
`python -m tests.references.images` stores the logits (needs torch, transformers).
"""

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from hearth.runtime.config import RopeConfig
from hearth.runtime.export.reference_pass import rope_frequencies
from hearth.runtime.image_processing.positions import pair_axes, row_positions
from hearth.runtime.images import ImageSpan
from tests.vision_models import FAMILIES, TEXT, VISION, Family, write_vision_model

Array = NDArray[np.float32]
_FILE = Path(__file__).parent / "images.safetensors"
HEAD = TEXT["head_dim"]


class ImageRow(NamedTuple):
    """A prompt: `token_ids` [T], `embeds` [T, H] of image tokens and `features` [features, T, H].

    Both are zero where `seen` [T] is false; `positions` [3, T] are those of all tokens.
    """

    token_ids: NDArray[np.int64]
    seen: NDArray[np.bool_]
    embeds: Array
    features: Array
    positions: NDArray[np.int32]


def image_rows(family: Family) -> list[ImageRow]:
    """A row with an image of 2 x 3 embeddings in it, and a shorter one without."""
    random = np.random.default_rng(5)
    deepstack = len(VISION[family].get("deepstack_visual_indexes", ()))
    hidden, grid = TEXT["hidden_size"], (0, 0, 0) if family == "idefics3" else (1, 2, 3)
    rows = []
    for length, spans in ((12, [ImageSpan(3, 6, grid=grid)]), (7, [])):
        seen = np.zeros(length, np.bool_)
        for span in spans:
            seen[span.start : span.start + span.length] = True
        values = random.normal(0, 0.7, (1 + deepstack, length, hidden)).astype(np.float32)
        values[:, ~seen] = 0
        positions, _ = row_positions(length, spans)
        if not positions.size:
            positions = np.tile(np.arange(length, dtype=np.int32), (3, 1))
        ids = random.integers(10, TEXT["vocab_size"], length)
        rows.append(ImageRow(ids, seen, values[0], values[1:], positions))
    return rows


def rotary_rows(rope: RopeConfig, positions: NDArray[np.int32]) -> tuple[Array, Array]:
    """Cosine and sine [T, rotary / 2] of positions [3, T]."""
    frequencies = rope_frequencies(rope, HEAD)
    axes = pair_axes(rope.mrope_section, interleaved=rope.mrope_interleaved)
    angles = positions[axes].T.astype(np.float32) * frequencies
    return np.cos(angles), np.sin(angles)


def stored_logits(family: Family) -> list[Array]:
    """The logits [T, V] of each of `image_rows`."""
    stored = load_file(_FILE)
    return [stored[f"{family}.{row}"] for row in range(2)]


def live_logits(family: Family, folder: Path) -> list[Array]:
    """The same by transformers, of the model in `folder`."""
    import torch  # noqa: PLC0415 - not everywhere
    import transformers  # noqa: PLC0415 - not everywhere

    loader: Any = transformers.AutoModelForImageTextToText
    model = loader.from_pretrained(folder, dtype=torch.float32).eval()
    decoder = model.model.text_model if family == "idefics3" else model.model.language_model
    logits = []
    for row in image_rows(family):
        with torch.no_grad():
            embeds = decoder.embed_tokens(torch.tensor(row.token_ids))
            seen = torch.tensor(row.seen)
            embeds[seen] = torch.tensor(row.embeds[row.seen])
            given = {"position_ids": torch.tensor(row.positions)[:, None].long()}
            if family == "idefics3":
                given = {}
            if len(row.features) and row.seen.any():
                given["visual_pos_masks"] = seen[None]
                given["deepstack_visual_embeds"] = [
                    torch.tensor(feature[row.seen]) for feature in row.features
                ]
            states = decoder(inputs_embeds=embeds[None], **given).last_hidden_state
            logits.append(model.lm_head(states)[0].numpy())
    return logits


def main() -> None:
    """Store the logits of all families."""
    stored = {}
    with tempfile.TemporaryDirectory() as folder:
        for family in FAMILIES:
            model = write_vision_model(Path(folder) / family, family)
            for row, logits in enumerate(live_logits(family, model)):
                stored[f"{family}.{row}"] = logits
    save_file(stored, _FILE)


if __name__ == "__main__":
    main()
