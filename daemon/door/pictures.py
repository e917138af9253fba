"""Pictures of clients: what is wrong with them, and their bytes on the way into the arena."""

from collections.abc import Generator, Iterator, Sequence

from hearth.actors.arena import Arena, slot_bytes
from hearth.actors.messages import ImageInput, Visual
from hearth.actors.scheduler.admission import within_share
from hearth.runtime.errors import HearthError
from hearth.runtime.image_processing.headers import read_header
from hearth.runtime.image_processing.raw_frames import PIXEL_BYTES, raw_size
from hearth.runtime.images import Picture, Slot
from hearth_client import protocol

Filling = Generator[None, None, list[Visual]]
"""Pictures on their way into the arena: one more with each step, at its end all visuals."""
VisualPart = tuple[str, protocol.ImagePart | protocol.VideoPart]
"""An image or a video of a message, and its field."""


def visuals_of(messages: Sequence[protocol.Message] | None) -> list[VisualPart]:
    """Images and videos in their order, each with its field."""
    return [
        (f"messages[{index}].content[{place}]", part)
        for index, turn in enumerate(messages or ())
        if isinstance(turn.content, list)
        for place, part in enumerate(turn.content)
        if not isinstance(part, protocol.TextPart)
    ]


def check_frames(message: protocol.ClientMessage, frames: int, most: int) -> None:
    """Raise HearthError unless the message names all of its `frames`, the first of which it is.

    `most` is how many pictures it may have.
    """
    shown, named = visuals_of(_messages_of(message)), set()
    if not shown and frames <= 1:
        return
    for index, (field, picture) in enumerate(_pictures(shown)):
        if not most:
            text = f"{field} is a picture: this model takes no images"
            raise HearthError("unsupported_option", text, field)
        if index >= most:
            text = f"{field} is one picture too many: a request may have {most}"
            raise HearthError("invalid_value", text, field)
        if picture.frame >= frames:
            at = f"{field}.frame"
            text = f"{at} is {picture.frame}: {frames - 1} frames came behind the message"
            raise HearthError("invalid_value", text, at)
        named.add(picture.frame)
    if len(named) != max(frames - 1, 0):
        text = f"{frames - 1} frames came behind the message, which names {len(named)}"
        raise HearthError("unsupported_option", text, "frames")


class Pictures:
    """The arena of pictures, and what of it is given out."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._slots = arena.slots()

    @property
    def bytes(self) -> int:
        """Bytes of the arena that pictures take now."""
        return self._slots.used

    def reserve(self, frames: Sequence[memoryview], own: int, share: float) -> list[Slot]:
        """Reserve a slot for each frame; nothing is taken where HearthError is raised.

        `own` bytes are taken by the same client, for which `within_share` has `share`.
        Raises `image_too_large` for what would never fit, `queue_full` and `too_many_requests` for
        want of free memory.
        """
        self._check_free(sum(slot_bytes(len(frame)) for frame in frames), own, share)
        slots: list[Slot] = []
        for frame in frames:
            slot = self._slots.take(len(frame))
            if slot is None:
                self.free(slots)
                raise self._full()
            slots.append(slot)
        return slots

    def fill(
        self,
        shown: Sequence[VisualPart],
        frames: Sequence[memoryview],
        slots: Sequence[Slot],
        most: int,
    ) -> Filling:
        """Check pictures of at most `most` bytes, and copy each frame into its slot, once.

        It yields between two pictures and returns the images and videos. Raises HearthError for a
        picture that is none or too large.
        """
        headers: list[Picture] = []
        copied = set()
        for field, picture in _pictures(shown):
            if headers:
                yield
            number = picture.frame - 1
            headers.append(_header(field, picture, frames[number], most))
            if number not in copied:
                self._arena.view(slots[number])[:] = frames[number]
                copied.add(number)
        found = iter(headers)
        return [_visual(part, slots, found) for _, part in shown]

    def free(self, slots: Sequence[Slot]) -> None:
        """Give back what a request had that has ended."""
        for slot in slots:
            self._slots.free(slot)

    def _check_free(self, size: int, own: int, share: float) -> None:
        most = self._slots.size
        if size > most:
            text = f"the pictures of this request have {size} bytes: the daemon holds {most} in all"
            raise HearthError("image_too_large", text, "images_in_flight_bytes")
        if self._slots.used + size > most:
            raise self._full()
        if not within_share(own, size, self._slots.used, most, share):
            text = f"pictures of {own} bytes of this client are held, its share: wait for an end"
            raise HearthError("too_many_requests", text, "client_queue_share")

    def _full(self) -> HearthError:
        text = f"{self.bytes} bytes of pictures are held already: try again later"
        return HearthError("queue_full", text, "images_in_flight_bytes")


def _messages_of(message: protocol.ClientMessage) -> list[protocol.Message] | None:
    kinds = (protocol.Generate, protocol.Tokenize)
    return message.messages if isinstance(message, kinds) else None


def _pictures(shown: Sequence[VisualPart]) -> Iterator[tuple[str, protocol.Picture]]:
    """Each picture, and its field."""
    for field, part in shown:
        if isinstance(part, protocol.ImagePart):
            yield field, part
        else:
            for index, frame in enumerate(part.frames):
                yield f"{field}.frames[{index}]", frame


def _visual(
    part: protocol.ImagePart | protocol.VideoPart, slots: Sequence[Slot], found: Iterator[Picture]
) -> Visual:
    if isinstance(part, protocol.ImagePart):
        return Visual([ImageInput(next(found), slots[part.frame - 1])])
    frames = [ImageInput(next(found), slots[frame.frame - 1]) for frame in part.frames]
    return Visual(frames, [frame.time_s for frame in part.frames])


def _header(field: str, picture: protocol.Picture, frame: memoryview, most: int) -> Picture:
    """Read a picture's header, from its first bytes or the client's message; nothing is decoded."""
    if len(frame) > most:
        text = f"{field} has {len(frame)} bytes: the limit is {most}"
        raise HearthError("image_too_large", text, field)
    try:
        return _file(picture, frame) if picture.format is not None else _raw(picture, frame)
    except HearthError as error:
        raise HearthError(error.code, f"{field}: {error.message}", field) from None


def _file(picture: protocol.Picture, frame: memoryview) -> Picture:
    header = read_header(frame)
    if header.kind != picture.format:
        text = f"this is a file of {header.kind}, and its format is given as {picture.format}"
        raise HearthError("image_invalid", text)
    return header


def _raw(picture: protocol.Picture, frame: memoryview) -> Picture:
    encoding = picture.encoding or "rgb8"
    width, height = picture.width or 0, picture.height or 0
    raw = Picture(encoding, width, height, picture.step or width * PIXEL_BYTES[encoding])
    if len(frame) != raw_size(raw):
        text = f"these are {len(frame)} bytes, and by size and step it has {raw_size(raw)}"
        raise HearthError("image_invalid", text)
    return raw
