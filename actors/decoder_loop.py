"""How a process decodes pictures for an encoder: its limits, and one job after the other."""

from __future__ import annotations

import resource
import socket
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from hearth.actors.decoder_jobs import PACKET_BYTES, DecoderJob, DecoderSettings, DecoderWord
from hearth.actors.own_process import die_first, die_with, ignore_signals
from hearth.runtime.errors import HearthError

Work = Callable[[DecoderJob], DecoderWord]


def serve(settings: DecoderSettings, work: Work) -> None:
    """Do one job after the other until the encoder closes the channel."""
    _limit_memory(settings.memory)
    decoder, encode = msgspec.msgpack.Decoder(DecoderJob), msgspec.msgpack.encode
    # Of an encoder that was killed it hears by an error where something was unread.
    with suppress(ConnectionError), socket.socket(fileno=settings.channel) as channel:
        channel.send(encode(DecoderWord()))
        while data := channel.recv(PACKET_BYTES):
            job = decoder.decode(data)
            try:
                word = work(job)
            except HearthError as error:
                word = DecoderWord(job.number, code=error.code, message=error.message)
            except MemoryError:
                what = "the picture needs more memory than decoding may take"
                word = DecoderWord(job.number, code="image_too_large", message=what)
            except Exception:  # noqa: BLE001 - told, and shown where the daemon's output goes
                traceback.print_exc()
                what = "a picture could not be prepared: the log tells why"
                word = DecoderWord(job.number, code="encoder_failed", message=what)
            channel.send(encode(word))


def settle(argument: str) -> DecoderSettings:
    """Read the settings of this process, and let it live and die with its parent's."""
    settings = msgspec.json.decode(argument, type=DecoderSettings)
    ignore_signals()
    die_with(settings.parent)
    die_first()
    # What a broken decoder leaves behind is of use to nobody.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return settings


def _limit_memory(beside: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + beside
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
