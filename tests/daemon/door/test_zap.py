import pytest
import zmq
from zmq.utils import z85

from hearth.daemon.door.zap import BURST, ENDPOINT, Zap

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


def test_a_key_may_open_some_connections_at_once_and_then_one_a_second() -> None:
    now = 100.0
    with zmq.Context() as context, context.socket(zmq.REQ) as asking:
        zap = Zap(context, lambda: now)
        asking.setsockopt(zmq.LINGER, 0)
        asking.connect(ENDPOINT)

        def code(key: bytes) -> bytes:
            asking.send_multipart([*GOOD[:6], key])
            zap.answer([PUBLIC, z85.encode(OTHER).decode()])
            return asking.recv_multipart(zmq.NOBLOCK)[2]

        mine = z85.decode(PUBLIC)
        assert {code(mine) for _ in range(BURST)} == {b"200"}
        assert code(mine) == b"300", "it is closed without a word, and may come again"
        assert code(OTHER) == b"200"
        now += 2.0
        assert [code(mine) for _ in range(3)] == [b"200", b"200", b"300"]
        now += 3600.0
        assert [code(mine) for _ in range(BURST + 1)] == [b"200"] * BURST + [b"300"]
        assert zap.admitted == 2 * BURST + 3
        now += BURST
        zap.put_off(PUBLIC)
        zap.put_off(PUBLIC)
        now += BURST
        assert code(mine) == b"300"
        now += 1.0
        assert [code(mine) for _ in range(2)] == [b"200", b"300"]
        zap.close()
