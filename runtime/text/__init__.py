from runtime.text.stream import TextStream
from runtime.text.tokenizer import Tokenizer

__all__ = ["TextStream", "Tokenizer"]
