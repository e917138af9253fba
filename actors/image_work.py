"""What actors say to one another of pictures: as they came, and what is to be made of them."""

import msgspec

from hearth.runtime.images import ImageLayout, ImageSpan, Picture, Slot


class ImageInput(msgspec.Struct, frozen=True, array_like=True):
    """A picture that a client has sent, and where its bytes lie in the arena of such."""

    picture: Picture
    slot: Slot


class Visual(msgspec.Struct, frozen=True, array_like=True):
    """An image, or a video: frames in order and the time of each in seconds."""

    frames: list[ImageInput]
    times: list[float] = []


class ImageWork(msgspec.Struct, frozen=True, array_like=True):
    """What becomes embeddings, and what it becomes; `key` is the same for what gives the same."""

    key: bytes
    visual: Visual
    layout: ImageLayout


class PromptImage(msgspec.Struct, frozen=True, array_like=True):
    """A visual of a prompt, and where its embeddings go there."""

    work: ImageWork
    spans: tuple[ImageSpan, ...]


class ImageTimes(msgspec.Struct, frozen=True, array_like=True):
    """Seconds that a visual took by stage."""

    decode_s: float = 0.0
    resize_s: float = 0.0
    engine_s: float = 0.0
