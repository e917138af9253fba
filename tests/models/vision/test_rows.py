from mmap import mmap
from pathlib import Path
from random import Random

import numpy as np
import pytest

from hearth.runtime.image_processing.positions import row_positions
from hearth.runtime.images import ImageSpan
from models.vision.batch import SIZES, Filler, Shape
from models.vision.rows import IMAGE, LENGTH, Writer, shown
from models.vision.tokens import vision_tokenizer

TOKENIZER = vision_tokenizer(Path(__file__).parents[3] / "models" / "home")
PAD = TOKENIZER.token_to_id(IMAGE)


@pytest.mark.parametrize("size", SIZES)
def test_a_row_has_the_positions_that_the_runtime_counts(size: tuple[int, int]) -> None:
    pictures = tuple(
        shown(Random(seed), size)._replace(across=False, down=False) for seed in (1, 2)
    )
    row = Writer(TOKENIZER).conversation(Random(3), pictures)
    tokens = size[0] * size[1] // 32**2
    starts = np.flatnonzero(row.ids == PAD)[::tokens]
    grid = (1, size[1] // 32, size[0] // 32)
    spans = [ImageSpan(int(start), tokens, grid=grid) for start in starts]
    assert len(spans) == 2
    assert np.array_equal(row.positions, row_positions(len(row.ids), spans).prompt)


def test_mirrored_pictures_have_mirrored_positions() -> None:
    plain = shown(Random(1), (224, 224))._replace(across=False, down=False)
    writer = Writer(TOKENIZER)
    first, second = (
        writer.prompt(plain._replace(across=across), "hello").positions for across in (False, True)
    )
    assert np.array_equal(first[:2], second[:2])
    line = slice(*np.flatnonzero(first[1] != first[2])[[0, -1]])
    assert not np.array_equal(first[2, line], second[2, line])
    assert sorted(first[2]) == sorted(second[2])


def test_only_answers_and_their_ends_are_learned() -> None:
    row = Writer(TOKENIZER).conversation(Random(4), (shown(Random(5), (224, 224)),))
    text = TOKENIZER.decode(row.ids[row.answers].tolist(), skip_special_tokens=False)
    whole = TOKENIZER.decode(row.ids.tolist(), skip_special_tokens=False)
    answers = [part.split("<|im_end|>")[0] for part in whole.split("<|im_start|>assistant\n")[1:]]
    assert text == "".join(f"{answer}<|im_end|>" for answer in answers)


def test_a_batch_names_the_places_of_its_pictures() -> None:
    shape = Shape(6, 3)
    memory = mmap(-1, shape.nbytes)
    size = Filler(TOKENIZER, 1, shape).fill(memory)
    arrays = shape.views(memory, size)
    assert arrays["ids"].shape == (6, LENGTH)
    assert (arrays["ids"].reshape(-1)[arrays["where"]] == PAD).all()
    assert len(arrays["where"]) == np.count_nonzero(arrays["ids"] == PAD)
    assert arrays["pixels"].shape[0] == 9
    assert arrays["pixels"].std() > 10
    del arrays
