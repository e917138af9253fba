from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from actors.addresses import SocketFolder
from actors.arena import Arena
from actors.encoder_messages import DropWork, Encode, EncodeFailed
from actors.host import run_actor
from actors.image_work import ImageInput, ImageWork, Visual
from actors.mailbox import Receiver, Sender, ZmqContext
from actors.messages import EncoderControl, EncoderMessage, SchedulerMessage, Shutdown
from actors.roles import EncoderSettings, HostConfig
from actors.supervisor_messages import ActorHello, ActorProgress, ActorReady, SupervisorMessage
from runtime.images import ImageLayout, Picture, Slot
from runtime.options import RuntimeOptions
from tests.actors.mail import next_mail

PICTURE = ImageInput(Picture("rgb8", 4, 4, 12), Slot(0, 48, 1))
LAYOUT = ImageLayout(4, 4, (1, 2, 2), 1)


def encode(number: int) -> Encode:
    work = ImageWork(b"key", Visual([PICTURE]), LAYOUT)
    return Encode(number, work, Slot(0, 48, 1), Slot(0, 64, 1))


class House:
    """The neighbours of an encoder that runs in a thread, as its process would run it."""

    def __init__(self, folder: Path, context: ZmqContext) -> None:
        self.arenas = [Arena.create(name, 4096) for name in ("pictures", "patches", "embeddings")]
        addresses = SocketFolder(folder).addresses("encoder", 1)
        pictures, patches, embeddings = (arena.shared for arena in self.arenas)
        settings = EncoderSettings(
            engine=str(folder),
            options=RuntimeOptions(),
            pictures=pictures,
            patches=patches,
            embeddings=embeddings,
        )
        config = HostConfig(
            name="encoder-1",
            role="encoder",
            settings=msgspec.Raw(msgspec.json.encode(settings)),
            addresses=addresses,
            parent=os.getpid(),
        )
        self.supervisor: Receiver[SupervisorMessage] = Receiver(
            context, [addresses.supervisor], SupervisorMessage, 100
        )
        self.scheduler: Receiver[SchedulerMessage] = Receiver(
            context, [addresses.scheduler], SchedulerMessage, 100
        )
        self.work: Sender[EncoderMessage] = Sender(context, addresses.work, 10)
        self.control: Sender[EncoderControl] = Sender(context, addresses.control, 10)
        self.thread = threading.Thread(target=run_actor, args=(config, context))

    def close(self) -> None:
        self.control.post(Shutdown())
        self.thread.join(10)
        assert not self.thread.is_alive()
        for mailbox in (self.supervisor, self.scheduler, self.work, self.control):
            mailbox.close()
        for arena in self.arenas:
            arena.close()


@pytest.fixture
def house(short_folder: Path) -> Iterator[House]:
    context: ZmqContext = zmq.Context()
    made = House(short_folder, context)
    yield made
    made.close()
    context.term()


def test_an_encoder_says_hello_and_ready_and_that_it_goes_on(house: House) -> None:
    house.thread.start()
    heard = [next_mail(house.supervisor, 10) for _ in range(3)]
    assert [type(one) for one in heard] == [ActorHello, ActorReady, ActorProgress]


def test_each_piece_of_work_is_answered_once_also_what_nobody_waits_for(house: House) -> None:
    for number in (1, 2, 3):
        house.work.post(encode(number))
    house.work.post(DropWork([2, 7]))
    house.thread.start()
    heard = [next_mail(house.scheduler, 10) for _ in range(3)]
    assert sorted(one.number for one in heard if isinstance(one, EncodeFailed)) == [1, 2, 3]
