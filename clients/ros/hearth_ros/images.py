"""Pictures of image topics: the newest one, and messages as the client takes them."""

from threading import Lock
from typing import Any

from hearth_client import Image, ImageInvalid


def picture_of(message: Any) -> Image:
    """Take a sensor_msgs/Image or sensor_msgs/CompressedImage for the client, pixels uncopied.

    Raises ImageInvalid or InvalidValue for what the daemon does not read, such as depth.
    """
    if hasattr(message, "encoding"):
        return Image(
            message.data,
            message.encoding,
            width=message.width,
            height=message.height,
            step=message.step,
        )
    if "compressedDepth" in message.format:
        raise ImageInvalid("a compressed depth image is no picture: scale it to 8 bits as mono8")
    return Image(bytes(message.data))


class LatestImage:
    """The newest message of the image topics; times are seconds of the node's clock.

    Messages that come faster than `rate_hz` are left out, 0 takes all. Safe between threads.
    """

    def __init__(self, rate_hz: float, late_frame_s: float) -> None:
        self.taken = 0
        self.left_out = 0
        self.late = 0
        self._period_s = 1 / rate_hz if rate_hz else 0.0
        self._late_frame_s = late_frame_s
        self._lock = Lock()
        self._message: Any = None
        self._stamp_s = 0.0
        self._came_s = float("-inf")

    def offer(self, message: Any, stamp_s: float, now_s: float) -> bool:
        """Keep a message in place of the one before; False where it comes too soon after it.

        A `stamp_s` of 0 means that the camera sets none.
        """
        with self._lock:
            # A clock that was set back starts anew.
            if 0 <= now_s - self._came_s < self._period_s:
                self.left_out += 1
                return False
            self._message, self._came_s = message, now_s
            self._stamp_s = stamp_s or now_s
            self.taken += 1
            return True

    def latest(self, now_s: float) -> tuple[Any, float | None]:
        """The newest message or None, and its age in seconds where that makes it late."""
        with self._lock:
            age_s = now_s - self._stamp_s
            if self._message is None or not 0 < self._late_frame_s < age_s:
                return self._message, None
            self.late += 1
            return self._message, age_s

    def clear(self) -> None:
        """Forget the message."""
        with self._lock:
            self._message, self._came_s = None, float("-inf")
