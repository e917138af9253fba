"""One Lark grammar, in the dialect of llguidance, for what a request asks of its reply."""

from hearth.runtime.text.conversation import Conversation, ResponseFormat
from hearth.runtime.text.tokenizer import Tokenizer


def reply_grammar(
    tokenizer: Tokenizer,
    conversation: Conversation,
    response_format: ResponseFormat | None = None,
    *,
    in_reasoning: bool = False,
) -> str | None:
    """The grammar of a reply; None where nothing is asked of it.

    Asked are a response format, a reasoning budget, a tool choice other than "none" and "auto", and
    in "auto" calls of `strict` tools. Raises `invalid_value`, or `grammar_invalid` for a grammar of
    the client's that cannot stand inside another, with the field.
    """
    raise NotImplementedError
