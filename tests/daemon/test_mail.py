from contextlib import ExitStack
from pathlib import Path

import zmq

from actors.messages import Cancel, DoorMessage, Failed
from daemon.configuration.settings import Settings
from daemon.mail import Mail
from daemon.wiring import address_book


def test_what_is_bound_gets_what_is_sent_and_all_is_closed(short_folder: Path) -> None:
    with zmq.Context() as context:
        with ExitStack() as opened:
            mail = Mail(context, address_book(Settings(), short_folder), opened)
            inbox = mail.bind("door", DoorMessage, 8)
            mail.connect(mail.here.door, 8).post(Failed(1, "internal", "x"))
            assert inbox.wait(2) == Failed(1, "internal", "x")
            assert any(short_folder.iterdir())
        assert not any(short_folder.iterdir())


def test_what_is_not_for_an_inbox_is_dropped(short_folder: Path) -> None:
    with zmq.Context() as context, ExitStack() as opened:
        mail = Mail(context, address_book(Settings(), short_folder), opened)
        inbox = mail.bind("door", DoorMessage, 8)
        mail.connect(mail.here.door, 8).post(Cancel(1))
        assert inbox.wait(0.2) is None
        assert inbox.undecodable == 1
