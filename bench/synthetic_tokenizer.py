"""A byte-level tokenizer of any vocabulary size, for models whose text means nothing."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_ID = 258
"""The id of `<|im_end|>`, which ends a turn."""

_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and a chat template of `vocabulary` ids.

    Ids 0..255 are the bytes, three special tokens follow, the rest are words that no text
    encodes to. `vocabulary` is at least 259.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"word{index}" for index in range(vocabulary - len(alphabet) - len(SPECIAL))]
    tokens = [*alphabet, *SPECIAL, *words]
    model = models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "Qwen2Tokenizer",
                "eos_token": SPECIAL[2],
                "pad_token": SPECIAL[0],
                "chat_template": _TEMPLATE,
                "model_max_length": 40_960,
            },
            indent=1,
        )
    )
