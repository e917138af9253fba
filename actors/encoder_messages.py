"""What is said to and of the encoder, and to an executor that runs the vision tower."""

from hearth.actors.actor_message import ActorMessage
from hearth.actors.image_work import ImageTimes, ImageWork
from hearth.runtime.images import ImageLayout, Slot

# --- to the encoder ---


class Encode(ActorMessage, tag="encode"):
    """Make patches of a visual in `patches` and, where the tower runs here, embeddings in `target`.

    It is answered once, by `Patched`, `Encoded` or `EncodeFailed`.
    """

    number: int
    work: ImageWork
    patches: Slot
    target: Slot


class DropWork(ActorMessage, tag="drop_work"):
    """Nobody waits for these any more: what has not begun fails with `cancelled`."""

    numbers: list[int]


# --- to the scheduler ---


class Patched(ActorMessage, tag="patched"):
    """The patches of a piece of work are in their slot: an executor is to run the tower on them."""

    number: int
    times: ImageTimes


class Encoded(ActorMessage, tag="encoded"):
    """The embeddings of a piece of work are in their slot; `times` has the part of who tells."""

    number: int
    times: ImageTimes


class EncodeFailed(ActorMessage, tag="encode_failed"):
    """A piece of work ended in a failure, of its own if `code` is one of an image."""

    number: int
    code: str
    message: str


class EncoderReady(ActorMessage, tag="encoder_ready"):
    """An encoder listens at `work`; any earlier one is gone."""

    work: str


class EncoderLost(ActorMessage, tag="encoder_lost"):
    """The encoder died, and what it was at has failed."""

    reason: str


# --- to an executor ---


class RunTower(ActorMessage, tag="run_tower"):
    """Make embeddings of patches, between two steps; `StepOutput.images` answers."""

    number: int
    layout: ImageLayout
    patches: Slot
    target: Slot
