from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from actors.addresses import AddressBook, Inbox, Place, Placement, Room
from runtime.errors import HearthError

INBOXES: tuple[Inbox, ...] = ("tokenizer", "scheduler", "scheduler_control", "door", "supervisor")
PLACES: tuple[Place, ...] = ("shared", "process")
ALL = [
    Placement(tokenizer=tokenizer, scheduler=scheduler, executor=executor)
    for tokenizer, scheduler, executor in itertools.product(PLACES, repeat=3)
]


def rooms(placement: Placement) -> set[Room]:
    return {
        "daemon",
        placement.room("tokenizer"),
        placement.room("scheduler"),
        placement.room("executor"),
    }


def test_the_default_keeps_all_but_the_executor_in_the_daemon() -> None:
    book = AddressBook(folder="/run/h", placement=Placement())
    here = book.seen_from("daemon")
    assert here.tokenizer == "inproc://tokenizer"
    assert book.seen_from("executor").tokenizer == "ipc:///run/h/tokenizer"
    assert book.endpoints("tokenizer") == ("inproc://tokenizer", "ipc:///run/h/tokenizer")
    assert book.executor(2).work == "ipc:///run/h/executor-2"


def test_all_shared_needs_no_files() -> None:
    book = AddressBook(folder="/" + "x" * 200, placement=Placement(executor="shared"))
    for inbox in INBOXES:
        assert book.endpoints(inbox) == (f"inproc://{inbox}",)
    assert book.executor(1).control_endpoints() == ("inproc://executor-1-control",)


@pytest.mark.parametrize("placement", ALL)
def test_every_sender_reaches_an_endpoint_that_is_bound(placement: Placement) -> None:
    book = AddressBook(folder="/run/h", placement=placement)
    for room, inbox in itertools.product(rooms(placement), INBOXES):
        assert getattr(book.seen_from(room), inbox) in book.endpoints(inbox)
    executor = book.executor(3)
    assert executor.control in executor.control_endpoints()
    assert executor.supervisor_control in executor.control_endpoints()


def test_a_shared_executor_listens_twice_when_the_scheduler_is_elsewhere() -> None:
    placement = Placement(executor="shared", scheduler="process")
    executor = AddressBook(folder="/run/h", placement=placement).executor(1)
    assert executor.control_endpoints() == (
        "inproc://executor-1-control",
        "ipc:///run/h/executor-1-control",
    )
    assert executor.work == "ipc:///run/h/executor-1"


def test_incarnations_have_addresses_of_their_own() -> None:
    book = AddressBook(folder="/run/h", placement=Placement())
    first, second = book.executor(1), book.executor(2)
    assert not {first.work, first.control} & {second.work, second.control}


def test_a_folder_that_is_too_long_is_refused() -> None:
    book = AddressBook(folder="/" + "x" * 104, placement=Placement())
    with pytest.raises(HearthError) as caught:
        book.endpoints("door")
    assert caught.value.code == "socket_unusable"


def test_sockets_of_one_incarnation_are_removed(tmp_path: Path) -> None:
    names = ("executor-1", "executor-1-control", "executor-10", "door")
    for name in names:
        (tmp_path / name).touch()
    AddressBook(folder=str(tmp_path), placement=Placement()).remove_sockets(1)
    assert {path.name for path in tmp_path.iterdir()} == {"executor-10", "door"}
