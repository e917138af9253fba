"""The tokenizer of the vision variant: the text model's, with four tokens for vision."""

import json
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from models.vision.rows import IMAGE, VISION_END, VISION_START

VIDEO: Final = "<|video_pad|>"
# The tokens of vision take the places of bytes that no UTF-8 text has, so that all ids keep theirs.
TOKENS: Final = {VISION_START: "ü", VISION_END: "ý", IMAGE: "þ", VIDEO: "ÿ"}


def vision_tokenizer(text: Path) -> Tokenizer:
    """Return the tokenizer of the text model's folder with the four tokens of vision."""
    tree = json.loads((text / "tokenizer.json").read_text("utf-8"))
    vocabulary = tree["model"]["vocab"]
    for token, byte in TOKENS.items():
        vocabulary[token] = vocabulary.pop(byte)
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        added = {"id": vocabulary[token], "content": token, **flags, "special": True}
        tree["added_tokens"].append(added)
    tree["model"]["vocab"] = dict(sorted(vocabulary.items(), key=lambda entry: entry[1]))
    return Tokenizer.from_str(json.dumps(tree))
