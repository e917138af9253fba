"""That no type of message is left out, and that there are mutations enough."""

from pathlib import Path

from hearth.actors.messages import ActorMessage
from tests.fuzz.doors import ALL, AT_LEAST, DOORS, PER_TYPE, TYPES

HERE = Path(__file__).parent


def test_every_type_has_its_share_of_all_mutations() -> None:
    assert PER_TYPE >= AT_LEAST
    assert PER_TYPE * TYPES >= ALL
    assert TYPES >= 47


def test_every_message_between_actors_goes_to_some_inbox() -> None:
    known = {kind for kinds in DOORS.values() for kind in kinds}
    sent = set(ActorMessage.__subclasses__())
    assert sent <= known


def test_every_door_has_its_test() -> None:
    sources = "".join(path.read_text() for path in HERE.glob("test_*.py"))
    assert all(f'"{name}"' in sources for name in DOORS)
