from typing import NamedTuple

PROFILE_CONTEXT = 0
"""Index of the profile of prefill steps."""
PROFILE_GENERATION = 1
"""Index of the first profile of decode, verify, proposal and accept steps."""


class InferenceDims(NamedTuple):
    """The six sizes of a step, and the only source of its shapes.

    `kv_len` counts the cache slots per row in the bucket in use. Every row has a start index.
    A tree mask has as many columns as the step has tokens, in every phase.
    """

    batch: int
    seq_len: int
    kv_len: int
    select_len: int
    attn_mask_seq_len: int
    start_index_len: int

    @property
    def mask_words(self) -> int:
        """Words of 32 bits that each token's mask takes."""
        return -(-self.attn_mask_seq_len // 32)

    @classmethod
    def prefill(cls, batch: int, seq_len: int, kv_len: int) -> "InferenceDims":
        """A prompt chunk of `seq_len` tokens a row, logits for the last of them."""
        return cls._of(batch, seq_len, kv_len, 1)

    @classmethod
    def decode(cls, batch: int, kv_len: int) -> "InferenceDims":
        """Make the dims of one token a row."""
        return cls._of(batch, 1, kv_len, 1)

    @classmethod
    def spec_verify(cls, batch: int, verify: int, kv_len: int) -> "InferenceDims":
        """A tree of `verify` tokens a row, logits for all of them."""
        return cls._of(batch, verify, kv_len, verify)

    @classmethod
    def proposal(cls, batch: int, proposal: int, top_k: int, kv_len: int) -> "InferenceDims":
        """A draft tree of `proposal` tokens a row, logits for the `top_k` newest."""
        return cls._of(batch, proposal, kv_len, top_k)

    @classmethod
    def accept(cls, batch: int, accepted: int, kv_len: int) -> "InferenceDims":
        """`accepted` tokens a row for the draft's cache, logits for the last of them."""
        return cls._of(batch, accepted, kv_len, 1)

    @classmethod
    def _of(cls, batch: int, seq_len: int, kv_len: int, select_len: int) -> "InferenceDims":
        return cls(
            batch=batch,
            seq_len=seq_len,
            kv_len=kv_len,
            select_len=select_len,
            attn_mask_seq_len=seq_len,
            start_index_len=batch,
        )


class TowerDims(NamedTuple):
    """The sizes of a call of a vision tower: patches, and the tokens that they become."""

    patches: int
    tokens: int


StepDims = InferenceDims | TowerDims
"""The sizes of a run of any engine."""
