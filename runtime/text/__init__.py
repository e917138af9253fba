from hearth.runtime.text.stream import TextStream
from hearth.runtime.text.tokenizer import Tokenizer

__all__ = ["TextStream", "Tokenizer"]
