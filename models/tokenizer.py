"""The tokenizer: a byte-level BPE in which a word has the same tokens at any position."""

from collections.abc import Iterator
from random import Random
from typing import Final

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from models.conversations import random_conversation, render
from models.splits import in_training

END_OF_TEXT: Final = "<|endoftext|>"
START: Final = "<|im_start|>"
END: Final = "<|im_end|>"
VOCABULARY: Final = 1024
CONVERSATIONS: Final = 4000

# A space is no part of a word, so that a name copied from the list into JSON keeps its tokens.
_PIECES: Final = r"\p{L}+|\p{N}|\n|[^\p{L}\p{N}\n]+"


def training_text(seed: int) -> Iterator[str]:
    """Yield the text of training conversations, without special tokens."""
    rng = Random(seed)
    for _ in range(CONVERSATIONS):
        text = render(random_conversation(rng, in_training).messages())
        yield text.replace(START, "").replace(END, "")


def train_tokenizer(seed: int) -> Tokenizer:
    """Return a tokenizer trained on generated conversations."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_text(seed), trainer)
    return tokenizer
