"""What all messages between actors have in common."""

import msgspec


class ActorMessage(msgspec.Struct, tag_field="t", array_like=True, omit_defaults=True):
    """A message between actors: positional, because both ends are always of one version."""


class FromExecutor(ActorMessage):
    """What one incarnation of an executor tells of rows, in order; the tokenizer hears it first.

    It passes on what the scheduler has to know, behind the tokens that came before: who hears of it
    may take these as delivered, even if the executor dies now.
    """

    incarnation: int
