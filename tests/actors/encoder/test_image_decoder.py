from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from hearth.actors import worker_process
from hearth.actors.arena import Arena, SharedArena
from hearth.actors.encoder.image_decoder import (
    FAULTS,
    ImageDecodeJob,
    ImageDecoder,
    ImageDecodeResult,
    ImageDecodeSettings,
)
from hearth.actors.messages import ImageInput
from hearth.runtime.errors import HearthError
from hearth.runtime.images import ImageLayout, Picture, Slot
from tests.actors.encoder.fake_decoder import (
    DIES,
    DIES_LATER,
    FAILS,
    FINE,
    GRABS,
    HANGS,
    PROGRAM,
    REFUSES,
)
from tests.runtime.vision.tower_config import config_of

PATIENCE_S = 60.0


class Clock:
    """The real time, and what a test adds to it."""

    def __init__(self) -> None:
        self.later = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.later


class Decoding:
    """A decoder whose process is tests.actors.encoder.fake_decoder."""

    def __init__(self, program: tuple[str, ...] = PROGRAM) -> None:
        self.arenas = [Arena.create(name, 4096) for name in ("pictures", "patches")]
        self.clock = Clock()
        self.decoder = ImageDecoder(
            config_of("qwen3_vl"),
            *(arena.shared for arena in self.arenas),
            timeout_s=100.0,
            memory=1 << 27,
            program=program,
            clock=self.clock,
        )

    def give(self, *kinds: int) -> None:
        for number, kind in enumerate(kinds):
            layout = ImageLayout(height=kind, width=0, grid=(1, 2, 2), tokens=1)
            self.decoder.give(ImageDecodeJob(number, [], layout, Slot(0, 0, 1)))

    def hear(self, count: int) -> dict[int, ImageDecodeResult]:
        """The next words, by number; each came once."""
        heard: list[ImageDecodeResult] = []
        deadline = time.monotonic() + PATIENCE_S
        while len(heard) < count:
            assert time.monotonic() < deadline
            select.select([self.decoder.descriptor], [], [], 0.05)
            heard += self.decoder.poll()
        words = {word.number: word for word in heard}
        assert len(words) == len(heard)
        return words

    def close(self) -> None:
        self.decoder.close()
        for arena in self.arenas:
            arena.close()


@pytest.fixture
def decoding() -> Iterator[Decoding]:
    made = Decoding()
    yield made
    made.close()


def test_jobs_are_answered_in_order_by_one_process(decoding: Decoding) -> None:
    decoding.give(FINE, REFUSES, FAILS, GRABS, FINE)
    words = decoding.hear(5)
    assert list(words) == [0, 1, 2, 3, 4]
    codes = [word.code for word in words.values()]
    assert codes == ["", "image_invalid", "encoder_failed", "image_too_large", ""]
    # Neither a refusal nor a lack of memory ended it.
    assert words[0].decode_s == words[4].decode_s


def test_a_picture_that_ends_the_process_fails_and_its_neighbours_do_not(
    decoding: Decoding,
) -> None:
    decoding.give(DIES, FINE, FINE)
    words = decoding.hear(3)
    assert [words[number].code for number in range(3)] == ["image_invalid", "", ""]


def test_what_died_behind_another_is_tried_again_once(decoding: Decoding) -> None:
    decoding.give(FINE, DIES_LATER, FINE, DIES)
    words = decoding.hear(4)
    # The second one worked in a process of its own; the last one ended two.
    assert [words[number].code for number in range(4)] == ["", "", "", "image_invalid"]
    assert words[0].decode_s != words[1].decode_s


def test_a_picture_that_takes_too_long_is_given_up_and_its_process_with_it(
    decoding: Decoding,
) -> None:
    decoding.give(FINE, HANGS, FINE)
    first = decoding.hear(1)[0]
    for _ in range(90):
        # Of a moment that a look was late, no more than a second counts.
        decoding.clock.later += 50
        assert decoding.decoder.poll() == []
    decoding.clock.later += 1
    for _ in range(20):
        decoding.clock.later += 1
        if words := decoding.decoder.poll():
            break
    assert [(word.number, word.code) for word in words] == [(1, "image_timeout")]
    last = decoding.hear(1)[2]
    assert last.code == ""
    assert last.decode_s != first.decode_s


def test_long_videos_are_jobs_too(decoding: Decoding) -> None:
    large = Slot(*[(1 << 32) - 1] * 3)
    frame = ImageInput(Picture("yuv422_yuy2", 60_000, 60_000, 120_000), large)
    layout = ImageLayout(FINE, 0, (2048, 2, 2), 2048, frames=tuple(range(4096)))
    for number in range(3):
        decoding.decoder.give(ImageDecodeJob(number, [frame] * 4096, layout, large))
    assert [word.code for word in decoding.hear(3).values()] == [""] * 3


def test_jobs_that_have_not_begun_can_be_dropped(decoding: Decoding) -> None:
    decoding.give(HANGS, FINE, FINE, FINE)
    decoding.decoder.wait_ready()
    assert decoding.decoder.drop([0, 2, 7]) == [2]
    assert decoding.decoder.drop([2, 3]) == [3]


def test_a_process_that_does_not_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    decoding = Decoding(("-c", "raise SystemExit(3)"))
    with pytest.raises(HearthError) as caught:
        decoding.decoder.wait_ready()
    assert caught.value.code == "encoder_failed"
    decoding.close()
    monkeypatch.setattr(worker_process, "START_S", 0.1)
    decoding = Decoding(("-c", "import time; time.sleep(3600)"))
    with pytest.raises(HearthError) as caught:
        decoding.decoder.wait_ready()
    assert "not ready in time" in caught.value.message
    decoding.close()


def test_a_process_that_is_ended_while_it_starts_is_replaced(tmp_path: Path) -> None:
    ends_once = (
        "import pathlib, runpy\n"
        f"been = pathlib.Path({str(tmp_path / 'been')!r})\n"
        "if not been.exists():\n"
        "    been.touch()\n"
        "    raise SystemExit(3)\n"
        f"runpy.run_path({PROGRAM[0]!r}, run_name='__main__')\n"
    )
    decoding = Decoding(("-c", ends_once))
    decoding.give(FINE, FINE)
    assert [word.code for word in decoding.hear(2).values()] == ["", ""]
    decoding.close()


def test_the_process_ends_with_the_decoder(decoding: Decoding) -> None:
    decoding.give(FINE)
    pid = int(decoding.hear(1)[0].decode_s)
    assert Path(f"/proc/{pid}").exists()
    decoding.decoder.close()
    assert not Path(f"/proc/{pid}").exists()


def test_the_end_of_an_encoder_ends_it_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "_limit_memory", lambda _: None)
    encoder, channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    nothing = SharedArena(-1, 0)
    settings = ImageDecodeSettings(
        channel=channel.detach(),
        parent=0,
        pictures=nothing,
        patches=nothing,
        config=config_of("qwen3_vl"),
        memory=0,
    )
    job = ImageDecodeJob(
        1, [], ImageLayout(height=2, width=2, grid=(1, 2, 2), tokens=1), Slot(0, 0, 1)
    )
    encoder.send(msgspec.msgpack.encode(job))
    done: list[int] = []

    def work(job: ImageDecodeJob) -> ImageDecodeResult:
        # With a word unread, as where it is killed.
        encoder.close()
        done.append(job.number)
        return ImageDecodeResult(job.number)

    worker_process.serve(settings, ImageDecodeJob, ImageDecodeResult, work, FAULTS)
    assert done == [1]
