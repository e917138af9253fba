import pytest
import zmq
from zmq.utils import z85

from daemon.door.zap import ENDPOINT, Zap

PUBLIC = zmq.curve_keypair()[0].decode()
GOOD = [b"1.0", b"7", b"hearth", b"127.0.0.1", b"", b"CURVE", z85.decode(PUBLIC)]
OTHER = z85.decode(zmq.curve_keypair()[0])


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        (GOOD, [b"1.0", b"7", b"200", b"OK", PUBLIC.encode(), b""]),
        ([*GOOD[:6], OTHER], [b"1.0", b"7", b"400", b"not listed", b"", b""]),
        ([*GOOD[:5], b"NULL"], [b"1.0", b"7", b"400", b"not listed", b"", b""]),
        ([*GOOD[:5], b"PLAIN", b"user", b"word"], [b"1.0", b"7", b"400", b"not listed", b"", b""]),
        ([*GOOD[:6], b""], [b"1.0", b"7", b"400", b"not listed", b"", b""]),
        ([b"2.0", *GOOD[1:]], [b"1.0", b"7", b"400", b"not listed", b"", b""]),
        ([b""], [b"1.0", b"", b"400", b"not listed", b"", b""]),
    ],
)
def test_keys_that_are_listed_are_let_in_and_nothing_else(
    asked: list[bytes], answer: list[bytes]
) -> None:
    with zmq.Context() as context, context.socket(zmq.REQ) as asking:
        zap = Zap(context)
        asking.setsockopt(zmq.LINGER, 0)
        asking.connect(ENDPOINT)
        asking.send_multipart(asked)
        assert zap.answer({PUBLIC: "robot"}) == (answer[2] == b"400")
        assert asking.recv_multipart(zmq.NOBLOCK) == answer
        assert zap.answer({PUBLIC: "robot"}) == 0
        zap.close()
