from pathlib import Path
from random import Random

import numpy as np
import pytest

from models.vision.rows import IMAGE, SIZES, Writer, shown, vision_tokenizer

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

TEXT = Path(__file__).parents[2] / "models" / "home"


@pytest.mark.parametrize("size", SIZES[:2])
def test_training_computes_what_transformers_does(size: tuple[int, int]) -> None:
    from models.vision.folder import new_model  # noqa: PLC0415 - needs torch
    from models.vision.forward import Reader, patches  # noqa: PLC0415 - needs torch

    torch.manual_seed(0)
    tokenizer = vision_tokenizer(TEXT)
    model = new_model(TEXT, tokenizer)
    pictures = tuple(
        shown(Random(seed), size)._replace(across=False, down=False) for seed in (0, 1)
    )
    row = Writer(tokenizer).conversation(Random(1), pictures)
    ids = torch.tensor(row.ids)[None]
    pixels = torch.tensor(np.stack([one.picture.pixels for one in pictures]))
    seen = ids == tokenizer.token_to_id(IMAGE)
    reader = Reader(model)
    with torch.no_grad():
        features = [part.flatten(0, -2) for part in reader.look(pixels)]
        where = torch.nonzero(seen.flatten())[:, 0]
        hidden = reader.read(ids, torch.tensor(row.positions)[:, None], features, where)
        flat = patches(pixels).flatten(0, 1).view(-1, 3, 1, 256)
        expected = model(
            input_ids=ids,
            pixel_values=flat.expand(-1, -1, 2, -1).flatten(1),
            image_grid_thw=torch.tensor([[1, size[1] // 16, size[0] // 16]] * 2),
            mm_token_type_ids=seen.int(),
            attention_mask=torch.ones_like(ids),
        ).logits
    assert torch.allclose(reader.logits(hidden), expected, atol=2e-3)
