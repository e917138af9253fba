"""A request's life by stage."""

from typing import NamedTuple

from daemon.door.finished import FinishedRequest


class Stage(NamedTuple):
    """A part of a request's life, in seconds from its arrival."""

    name: str
    begin: float
    seconds: float

    @property
    def end(self) -> float:
        """When it was over."""
        return self.begin + self.seconds


def stages(ended: FinishedRequest) -> list[Stage]:
    """The stages that a request has ended, in their order.

    Detokenizing happens in pieces, beside decoding and behind it: it is told as one stage that
    begins with the first token.
    """
    images = ended.tokenize_s
    queue = images + ended.images_s
    prefill = queue + ended.queue_s
    decode = prefill + ended.prefill_s
    found = [
        Stage("tokenize", 0.0, ended.tokenize_s),
        Stage("images", images, ended.images_s),
        Stage("queue", queue, ended.queue_s),
        Stage("prefill", prefill, ended.prefill_s),
        Stage("decode", decode, ended.decode_s),
        Stage("detokenize", decode, ended.detokenize_s),
    ]
    return [stage for stage in found if stage.seconds > 0]
