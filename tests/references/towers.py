"""What transformers gives for the vision towers of `tests.vision_models`, in float32.

`python -m tests.references.towers` makes the stored numbers anew (needs torch, transformers).
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from tests.vision_models import FAMILIES, Family, Spelling, write_vision_model
from tests.vision_processors import colours_of

Array = NDArray[Any]
GRIDS: dict[Family, list[tuple[int, int, int]]] = {
    "qwen3_vl": [(1, 4, 6), (1, 10, 4), (2, 2, 4)],
    "qwen2_5_vl": [(1, 4, 6), (1, 10, 14), (2, 2, 4)],
    "idefics3": [(1, 4, 4), (1, 4, 4), (1, 4, 4)],
}
"""Pictures of different sizes and shapes, the last of the Qwens videos; Idefics3 has tiles."""
_FILE = Path(__file__).with_suffix(".safetensors")
_SIDE = 8


def patches_of(family: Family) -> NDArray[np.uint8]:
    """Patches [T, patch bytes] of noise for all pictures."""
    count = sum(time * height * width for time, height, width in GRIDS[family])
    size = 3 * _SIDE**2 * (1 if family == "idefics3" else 2)
    return np.random.default_rng(1).integers(0, 256, (count, size), np.uint8)


def stored_outputs(family: Family) -> dict[str, Array]:
    """Each output of the tower of a family, by binding."""
    stored = load_file(_FILE)
    return {
        name.removeprefix(f"{family}."): value
        for name, value in stored.items()
        if name.startswith(f"{family}.")
    }


def live_outputs(folder: Path, family: Family, spelling: Spelling) -> dict[str, Array]:
    """The same by the installed transformers, which has to find every tensor in its place."""
    import torch  # noqa: PLC0415 - not everywhere
    from transformers import AutoModelForImageTextToText  # noqa: PLC0415 - likewise

    source = write_vision_model(folder, family, spelling)
    read = AutoModelForImageTextToText.from_pretrained
    model, told = read(source, dtype=torch.float32, output_loading_info=True)
    if any(told.values()):
        raise ValueError(f"transformers says {told}")
    patches = patches_of(family)
    mean, std = (np.array(one, np.float32)[:, None] for one in colours_of(family))
    colours = patches.reshape(len(patches), 3, -1) * np.float32(1 / 255)
    pixels = ((colours - mean) / std).reshape(len(patches), -1)
    with torch.no_grad():
        return _run(torch, model.model.eval(), family, pixels)


def _run(torch: Any, model: Any, family: Family, pixels: Array) -> dict[str, Array]:
    grids = GRIDS[family]
    if family == "idefics3":
        # Each tile is 16 patches, which come in blocks of 2 x 2.
        blocks = pixels.reshape(len(grids), 2, 2, 2, 2, 3, _SIDE, _SIDE)
        tiles = blocks.transpose(0, 5, 1, 3, 6, 2, 4, 7).reshape(-1, 3, 4 * _SIDE, 4 * _SIDE)
        seen = model.vision_model(torch.tensor(tiles)).last_hidden_state
        return {"embeddings": model.connector(seen).flatten(0, 1).numpy()}
    out = model.visual(torch.tensor(pixels), torch.tensor(grids))
    features = getattr(out, "deepstack_features", None) or []
    outputs = {f"deepstack_{k}": one.numpy() for k, one in enumerate(features)}
    return {"embeddings": out.pooler_output.numpy(), **outputs}


def main() -> None:
    """Make the stored numbers anew."""
    import tempfile  # noqa: PLC0415 - of this alone

    stored: dict[str, Array] = {}
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            outputs = live_outputs(Path(folder) / "model", family, "published")
        stored |= {f"{family}.{name}": value for name, value in outputs.items()}
    save_file(stored, _FILE)


if __name__ == "__main__":
    main()
