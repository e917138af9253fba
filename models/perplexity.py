"""Perplexity of held-out conversations with rounded weights.

`python -m models.perplexity` prints it for every form. The model is computed in NumPy from the
numbers that an engine of this form has, over the answers, which it was trained to give, and over
every token of the text.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from msgspec import structs
from tokenizers import Tokenizer

from hearth.runtime.config import Quantization
from hearth.runtime.export.checkpoint import Checkpoint
from hearth.runtime.export.engine_files import engine_config
from hearth.runtime.export.model_config import ModelConfig, load_model_config
from hearth.runtime.export.options import ExportOptions
from hearth.runtime.export.reference_pass import RoundedWeights, reference_logits
from hearth.runtime.export.weights import Kind
from models.conversations import render
from models.splits import Prompt, held_out
from models.stream import Batch, Row, padded

HOME: Final = Path(__file__).parent / "home"
FLOAT: Final = ExportOptions(backend="kernels", device="cuda", dtype="float16")
BATCH: Final = 24


class Form(NamedTuple):
    """Number formats in which weights are stored."""

    body: Kind
    head: Quantization
    block: int

    @property
    def options(self) -> ExportOptions:
        """Export options of an engine of this form."""
        return structs.replace(
            FLOAT,
            quantization=self.body,
            head_quantization=self.head,
            block_size=self.block,
        )


FORMS: Final = (
    Form("int8", "int8", 64),
    *(Form("int4", head, block) for head in ("none", "int4") for block in (32, 64)),
)
"""Blocks are those that divide the shipped model's inputs."""


class Perplexity(NamedTuple):
    """Perplexity of the answers alone, and of the whole text.

    `right` is the share of answers of which every token is the likeliest.
    """

    answers: float
    text: float
    right: float


def conversations(tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> list[Batch]:
    """Held-out prompts with their right answers as batches of like length."""
    texts = [
        render([*prompt.messages, {"role": "assistant", "content": prompt.expected}])
        for prompt in prompts
    ]
    found = [Row(np.array(one.ids, np.int64)) for one in tokenizer.encode_batch(texts)]
    rows = sorted(found, key=lambda row: len(row.ids))
    return [padded(rows[i : i + BATCH], tokenizer) for i in range(0, len(rows), BATCH)]


def perplexity(
    model: ModelConfig, checkpoint: Checkpoint, batches: Sequence[Batch], options: ExportOptions
) -> Perplexity:
    """Perplexity of a model with its weights rounded as an engine of these options has them."""
    weights = RoundedWeights(checkpoint, engine_config(model, options))
    answers, texts, right = [], [], []
    for ids, of_answers in batches:
        logits = reference_logits(model, weights, ids)[:, :-1].astype(np.float64)
        largest = logits.max(axis=-1)
        sums = np.log(np.exp(logits - largest[..., None]).sum(axis=-1)) + largest
        lost = sums - np.take_along_axis(logits, ids[:, 1:, None], axis=-1)[..., 0]
        wanted = of_answers[:, 1:]
        answers.append(lost[wanted])
        texts.append(lost[ids[:, 1:] != 0])  # what pads a row
        right.append((~wanted | (logits.argmax(axis=-1) == ids[:, 1:])).all(axis=1))
    means = [float(np.concatenate(one).mean()) for one in (answers, texts, right)]
    return Perplexity(float(np.exp(means[0])), float(np.exp(means[1])), means[2])


def main() -> None:
    """Print the perplexity of every form, and how many times that of 16 bits it is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=HOME)
    parser.add_argument("--every", type=int, default=12, help="take every so-many-th prompt")
    flags = parser.parse_args()
    model, checkpoint = load_model_config(flags.folder), Checkpoint(flags.folder)
    tokenizer = Tokenizer.from_file(str(flags.folder / "tokenizer.json"))
    batches = conversations(tokenizer, held_out()[:: flags.every])
    whole = perplexity(model, checkpoint, batches, FLOAT)
    print("form answers text right; times that of 16 bits: answers text")
    print(f"16 bits {whole.answers:.4f} {whole.text:.1f} {whole.right:.3f}")
    for form in FORMS:
        found = perplexity(model, checkpoint, batches, form.options)
        print(
            f"{'/'.join(map(str, form))} {found.answers:.4f} {found.text:.1f} {found.right:.3f}; "
            f"{found.answers / whole.answers:.4f} {found.text / whole.text:.4f}"
        )


if __name__ == "__main__":
    main()
