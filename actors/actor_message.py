"""What all messages between actors have in common."""

import msgspec


class ActorMessage(msgspec.Struct, tag_field="t", array_like=True, omit_defaults=True):
    """A message between actors: positional, because both ends are always of one version."""
