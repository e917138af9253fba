from pathlib import Path

import pytest

from hearth.actors.addresses import SocketFolder, remove_sockets
from hearth.runtime.errors import HearthError


def test_incarnations_have_addresses_of_their_own() -> None:
    sockets = SocketFolder(Path("/run/h"))
    first, second = sockets.addresses("executor", 1), sockets.addresses("executor", 2)
    assert (first.work, first.control) == (
        "ipc:///run/h/executor-1",
        "ipc:///run/h/executor-1-control",
    )
    assert not {first.work, first.control} & {second.work, second.control}
    assert first.tokenizer == second.tokenizer == sockets.tokenizer
    assert first.supervisor == second.supervisor == sockets.supervisor("executor")


def test_actors_share_nothing_but_the_tokenizer() -> None:
    sockets = SocketFolder(Path("/run/h"))
    one, other = sockets.addresses("executor", 1), sockets.addresses("encoder", 1)
    mine = {one.work, one.control, one.supervisor}
    assert not mine & {other.work, other.control, other.supervisor}


def test_a_folder_that_is_too_long_is_refused() -> None:
    with pytest.raises(HearthError) as caught:
        SocketFolder(Path("/" + "x" * 104)).addresses("executor", 1)
    assert caught.value.code == "socket_unusable"


def test_sockets_of_one_incarnation_are_removed(tmp_path: Path) -> None:
    for name in ("executor-1", "executor-1-control", "executor-10", "door"):
        (tmp_path / name).touch()
    remove_sockets(SocketFolder(tmp_path).addresses("executor", 1))
    assert {path.name for path in tmp_path.iterdir()} == {"executor-10", "door"}
