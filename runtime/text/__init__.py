from hearth.runtime.text.reply_reader import ReplyReader
from hearth.runtime.text.stream import TextStream
from hearth.runtime.text.tokenizer import Tokenizer

__all__ = ["ReplyReader", "TextStream", "Tokenizer"]
