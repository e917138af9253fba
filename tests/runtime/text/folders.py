"""Engine folders with small tokenizers of the kinds that served models have."""

from pathlib import Path

import tokenizers
from msgspec import structs
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.engine_folder import TEMPLATE_FILE, TOKENIZER_FILE, write_config
from hearth.runtime.text.tokenizer import Tokenizer
from tests.runtime.engine_configs import small_config

CHATML = (
    "{% for message in messages %}\n"
    "<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB = 400
UNKNOWN = "<unk>"
_CORPUS = ["turn on the lamp in the kitchen", "the heater is at 21 degrees", "grüße 你好 🙂"] * 20


def write_folder(
    folder: Path,
    library: tokenizers.Tokenizer,
    template: str | None = CHATML,
    *,
    vocab_size: int = VOCAB,
    eos: int = 2,
    bos: int | None = None,
) -> Path:
    library.save(str(folder / TOKENIZER_FILE))
    if template is not None:
        (folder / TEMPLATE_FILE).write_text(template, encoding="utf-8")
    ids = {"bos_token": bos, "eos_token": eos}
    named = {name: library.id_to_token(one) for name, one in ids.items() if one is not None}
    tokens = {name: token for name, token in named.items() if token is not None}
    config = structs.replace(make_config(vocab_size, eos, bos), template_tokens=tokens)
    write_config(folder, config)
    return folder


def open_tokenizer(
    folder: Path,
    library: tokenizers.Tokenizer,
    template: str | None = CHATML,
    bos: int | None = None,
) -> Tokenizer:
    return Tokenizer.open(write_folder(folder, library, template, bos=bos))


def byte_level() -> tokenizers.Tokenizer:
    """Byte-level BPE with the tokens of ChatML, as Qwen and Llama 3 are made."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=350,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(_CORPUS, trainer)
    library.add_tokens(["<think>", "</think>"])
    return library


def byte_fallback() -> tokenizers.Tokenizer:
    """Spaces as a letter and bytes for unknown characters, as Llama 2 is made."""
    pieces = [UNKNOWN, "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz.,", "▁t", "th", "▁th", "he"]
    merges = [("▁", "t"), ("t", "h"), ("▁t", "h"), ("h", "e")]
    library = tokenizers.Tokenizer(
        models.BPE(
            {piece: number for number, piece in enumerate(pieces)},
            merges,
            unk_token=UNKNOWN,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    library.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    library.add_special_tokens([UNKNOWN, "<s>", "</s>"])
    return library


def word_level() -> tokenizers.Tokenizer:
    """Whole words, where a special token's text is in the vocabulary of words as well."""
    words = [UNKNOWN, "<sys>", "</s>", "turn", "on", "sys>", "user"]
    vocabulary = {word: number for number, word in enumerate(words)}
    library = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens([UNKNOWN, "<sys>", "</s>"])
    return library


def make_config(vocab_size: int, eos: int = 2, bos: int | None = None) -> LLMEngineRunnerConfig:
    return structs.replace(
        small_config(),
        vocab_size=vocab_size,
        output_vocab_size=vocab_size,
        eos_token_ids=(eos,),
        bos_token_id=bos,
    )
