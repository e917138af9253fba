"""The file of one page of the prefix cache: a head of fixed length, and the page's bytes behind."""

import hashlib
import struct
from typing import NamedTuple

from runtime.errors import HearthError
from runtime.prefix.identities import NAME_BYTES, PAGE_TOKENS, TOKEN_BYTES, page_name

VERSION = 2
"""1 knew videos by their bytes alone, whichever of their frames these were of."""
SUFFIX = ".page"
_MAGIC = b"HEARTHKV"
_MOST_TOKENS_BYTES = PAGE_TOKENS * TOKEN_BYTES
# Magic, version, draft, tokens, bytes of the page; engine, root, parent; digest of the page.
_FIELDS = struct.Struct(f"<8sIIIQ{NAME_BYTES}s{NAME_BYTES}s{NAME_BYTES}s32s")
_DIGESTED = _FIELDS.size + _MOST_TOKENS_BYTES
HEAD_BYTES = _DIGESTED + 32


class SpillHead(NamedTuple):
    """What a file says of its page.

    `engine` and `root` are names of what has computed it, `parent` of the page before; `digest` is
    the SHA-256 of the page's `size` bytes.
    """

    engine: bytes
    root: bytes
    parent: bytes
    tokens: bytes
    draft: bool
    size: int
    digest: bytes

    @property
    def name(self) -> bytes:
        """The name of the page."""
        return page_name(self.parent, self.tokens)


def encode_head(head: SpillHead) -> bytes:
    """The first `HEAD_BYTES` of a file; the last of them are a digest of those before."""
    fields = _FIELDS.pack(
        _MAGIC,
        VERSION,
        head.draft,
        len(head.tokens) // TOKEN_BYTES,
        head.size,
        head.engine,
        head.root,
        head.parent,
        head.digest,
    )
    said = fields + head.tokens.ljust(_MOST_TOKENS_BYTES, b"\0")
    return said + hashlib.sha256(said).digest()


def decode_head(data: bytes, name: str) -> SpillHead:
    """Raises `spill_invalid`, naming the file, for what is no whole head of this version."""
    magic, version = struct.unpack_from("<8sI", data.ljust(12, b"\0"))
    if magic != _MAGIC:
        raise spill_invalid(name, "is no page of the prefix cache")
    if version != VERSION:
        raise spill_invalid(name, f"is of version {version} and {VERSION} is read here")
    said = data[:_DIGESTED]
    if hashlib.sha256(said).digest() != data[_DIGESTED:HEAD_BYTES]:
        raise spill_invalid(name, "is damaged")
    _, _, draft, count, size, engine, root, parent, digest = _FIELDS.unpack_from(said)
    if not 0 < count <= PAGE_TOKENS:
        raise spill_invalid(name, f"says that it holds {count} tokens")
    tokens = said[_FIELDS.size : _FIELDS.size + count * TOKEN_BYTES]
    return SpillHead(engine, root, parent, tokens, bool(draft), size, digest)


def spill_invalid(name: str, what: str) -> HearthError:
    """The error about a file of that name, which is removed."""
    return HearthError(
        "spill_invalid", f"{name} {what}: it is removed, and what it held is computed", name
    )
