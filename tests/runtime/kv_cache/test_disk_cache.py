import errno
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.runtime.errors import HearthError
from hearth.runtime.kv_cache import disk_cache
from hearth.runtime.kv_cache.disk_cache import MOST_WAITING, VERSION, PageFileHeader, encode_head
from hearth.runtime.kv_cache.page_index import PageIndex
from hearth.runtime.kv_cache.pages import Erase, Page, TierCapacity
from tests.runtime.kv_cache.prompts import (
    DATA,
    FILE_BYTES,
    ROOTS,
    SOON_S,
    files,
    fill,
    identities,
    open_folder,
    pages,
)


def refuses(folder: Path, words: str, blocks: list[int]) -> None:
    """The file of the only page serves nothing, neither to be found nor to be read."""
    (page,) = pages(blocks)
    (path,) = files(folder)
    data, mode = path.read_bytes(), path.stat().st_mode
    disk_cache = open_folder(folder)
    with pytest.raises(HearthError, match=words) as caught:
        disk_cache.read(page)
    assert (caught.value.code, caught.value.field) == ("spill_invalid", path.name)
    assert files(folder) == []
    path.write_bytes(data)
    path.chmod(mode)
    found = disk_cache.found()
    # What the head does not tell shows when the page is read.
    if found:
        assert words == "is damaged"
    else:
        (failure,) = disk_cache.take_failures()
        assert words in failure.message
        assert files(folder) == []
    disk_cache.close(SOON_S)


def test_a_page_is_there_after_a_restart_and_nobody_else_may_read_it(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "prefix"
    first, second = fill(folder, [1, 2])
    disk_cache = open_folder(folder)
    found = sorted(disk_cache.found(), key=lambda one: one.parent != ROOTS[0])
    assert [stored[:4] for stored in found] == [
        (ROOTS[0], ROOTS[0], first.tokens, False),
        (ROOTS[0], first.name, second.tokens, False),
    ]
    assert disk_cache.read(second) == DATA
    for path in files(folder):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for path in (folder, *folder.iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    disk_cache.close(SOON_S)


def test_an_index_goes_on_with_what_a_folder_has(tmp_path: Path) -> None:
    written = fill(tmp_path, [1, 2, 3])
    fill(tmp_path, [4])
    disk_cache = open_folder(tmp_path)
    disk_cache.erase(written[1].name)
    index = PageIndex(TierCapacity(4, 0, disk_cache.pages))
    for change in index.adopt(disk_cache.found()):
        assert isinstance(change, Erase)
        disk_cache.erase(change.name)
    match = index.match(identities([1, 2]), 64)
    assert (match.tokens, len(files(tmp_path)), len(index)) == (32, 2, 2)
    assert disk_cache.read(match.pages[0]) == DATA
    disk_cache.close(SOON_S)


@pytest.fixture
def stalled(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing is written until this is set."""
    go_on = threading.Event()

    def encode(head: PageFileHeader) -> bytes:
        assert go_on.wait(SOON_S)
        return encode_head(head)

    monkeypatch.setattr(disk_cache, "encode_head", encode)
    yield go_on
    go_on.set()


def test_what_waits_to_be_written_is_read_from_memory_and_can_be_erased(
    tmp_path: Path, stalled: threading.Event
) -> None:
    disk_cache = open_folder(tmp_path)
    first, second, third = pages([1, 2, 3])
    for page in (first, second, third):
        assert disk_cache.write(page, DATA)
    assert disk_cache.read(third) == DATA
    # The first one is in the writer's hands already, the third waits.
    disk_cache.erase(first.name)
    disk_cache.erase(third.name)
    stalled.set()
    disk_cache.close(SOON_S)
    assert [path.stem for path in files(tmp_path)] == [second.name.hex()]
    assert not disk_cache.write(first, DATA)


def test_a_page_that_is_brought_again_is_written_as_it_is_now(
    tmp_path: Path, stalled: threading.Event
) -> None:
    disk_cache = open_folder(tmp_path)
    (page,) = pages([1])
    assert disk_cache.write(page, DATA)
    page.draft = True
    assert disk_cache.write(page, DATA[::-1])
    stalled.set()
    disk_cache.close(SOON_S)
    disk_cache = open_folder(tmp_path)
    assert [stored.draft for stored in disk_cache.found()] == [True]
    assert disk_cache.read(page) == DATA[::-1]
    disk_cache.close(SOON_S)


def test_who_brings_more_than_may_wait_is_refused_or_waits(
    tmp_path: Path, stalled: threading.Event
) -> None:
    disk_cache = open_folder(tmp_path, room=100)
    many = pages(list(range(MOST_WAITING + 2)))
    assert [disk_cache.write(page, DATA) for page in many[:-1]] == [True] * MOST_WAITING + [False]
    assert not disk_cache.write(many[-1], DATA, within_s=0.01)
    stalled.set()
    assert disk_cache.write(many[-1], DATA, within_s=SOON_S)
    disk_cache.close(SOON_S)
    assert len(files(tmp_path)) == MOST_WAITING + 1


def test_a_disk_that_is_full_is_told_once_and_the_pages_are_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    disk_cache = open_folder(tmp_path)
    first, second, third = pages([1, 2, 3])
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "mkstemp", full)
        for page in (first, second):
            assert disk_cache.write(page, DATA)
        lost: list[Page] = []
        while len(lost) < 2:
            lost += disk_cache.take_lost()
    assert lost == [first, second]
    (failure,) = disk_cache.take_failures()
    assert (failure.code, failure.field) == ("spill_failed", "prefix_folder")
    assert "No space left on device" in failure.message
    assert disk_cache.write(third, DATA)
    disk_cache.close(SOON_S)
    assert [path.stem for path in files(tmp_path)] == [third.name.hex()]


def test_pages_of_other_engines_give_way_and_nothing_else_does(tmp_path: Path) -> None:
    fill(tmp_path, [1, 2], b"another engine")
    (tmp_path / "notes.page").write_text("not ours")
    others = files(tmp_path)[:2]
    os.utime(others[1], (1, 1))
    disk_cache = open_folder(tmp_path, room=3)
    assert (disk_cache.found(), disk_cache.pages) == ([], 3)
    for page in pages([1, 2]):
        assert disk_cache.write(page, DATA)
    disk_cache.close(SOON_S)
    left = files(tmp_path)
    assert (others[0] in left, others[1] in left, tmp_path / "notes.page" in left) == (
        True,
        False,
        True,
    )
    assert sum(path.stat().st_size for path in left) == 3 * FILE_BYTES + len("not ours")
    disk_cache = open_folder(tmp_path, room=2)
    assert len(disk_cache.found()) == 2
    disk_cache.close(SOON_S)
    assert not others[0].parent.exists()


@pytest.mark.parametrize(
    ("begin", "end", "data", "words"),
    [
        (0, 8, b"GGUFGGUF", "is no page of the prefix cache"),
        (8, 12, b"\x01\0\0\0", f"is of version 1 and {VERSION} is read here"),
        (24, 32, b"\xff" * 8, "is damaged"),
        (40, 41, b"\0", "is damaged"),
        (-1, None, b"\0", "is damaged"),
        (-1, None, b"", f"bytes and not {FILE_BYTES}"),
        (FILE_BYTES, None, b"more", f"bytes and not {FILE_BYTES}"),
        (0, None, b"", "is no page of the prefix cache"),
        (200, None, b"", "is damaged"),
    ],
)
def test_a_damaged_file_or_one_of_another_version_serves_nothing(
    tmp_path: Path, begin: int, end: int | None, data: bytes, words: str
) -> None:
    fill(tmp_path, [1])
    (path,) = files(tmp_path)
    held = bytearray(path.read_bytes())
    held[begin:end] = data
    path.write_bytes(held)
    refuses(tmp_path, words, [1])


def test_a_page_of_another_engine_serves_nothing(tmp_path: Path) -> None:
    fill(tmp_path / "other", [1], b"another engine")
    (other,) = files(tmp_path / "other")
    fill(tmp_path / "own", [1])
    (own,) = files(tmp_path / "own")
    other.replace(own)
    refuses(tmp_path / "own", "belongs to another engine", [1])


def test_a_page_under_anothers_name_serves_nothing(tmp_path: Path) -> None:
    fill(tmp_path, [1])
    fill(tmp_path, [2])
    (page,) = pages([1])
    own, other = sorted(files(tmp_path), key=lambda path: path.stem != page.name.hex())
    other.replace(own)
    refuses(tmp_path, "has the name of another page", [1])


def test_a_file_that_others_could_have_written_serves_nothing(tmp_path: Path) -> None:
    fill(tmp_path, [1])
    files(tmp_path)[0].chmod(0o620)
    refuses(tmp_path, "cannot be read", [1])
    (own,) = tmp_path.iterdir()
    target = tmp_path / "elsewhere"
    target.write_bytes(b"")
    (own / f"{pages([1])[0].name.hex()}.page").symlink_to(target)
    disk_cache = open_folder(tmp_path)
    assert disk_cache.found() == []
    assert files(tmp_path) == [target]
    disk_cache.close(SOON_S)


def test_a_page_that_is_gone_or_lacks_the_drafts_state_is_not_served(tmp_path: Path) -> None:
    (page,) = fill(tmp_path, [1])
    disk_cache = open_folder(tmp_path)
    page.draft = True
    with pytest.raises(HearthError, match="is damaged"):
        disk_cache.read(page)
    with pytest.raises(HearthError, match="No such file"):
        disk_cache.read(page)
    disk_cache.close(SOON_S)


def test_a_folder_in_a_pages_place_serves_nothing_and_is_not_held_open(tmp_path: Path) -> None:
    (page,) = fill(tmp_path, [1])
    (path,) = files(tmp_path)
    path.unlink()
    path.mkdir()
    disk_cache = open_folder(tmp_path)
    before = list(Path("/proc/self/fd").iterdir())
    for _ in range(3):
        with pytest.raises(HearthError, match="cannot be read"):
            disk_cache.read(page)
    assert list(Path("/proc/self/fd").iterdir()) == before
    disk_cache.close(SOON_S)


def test_a_folder_that_was_removed_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "prefix"
    first, second = pages([1, 2])
    disk_cache = open_folder(folder)
    written = threading.Event()
    replace = Path.replace

    def replace_and_tell(path: Path, target: Path) -> Path:
        found = replace(path, target)
        written.set()
        return found

    monkeypatch.setattr(Path, "replace", replace_and_tell)
    assert disk_cache.write(first, DATA)
    assert written.wait(SOON_S)
    shutil.rmtree(folder)
    assert disk_cache.write(second, DATA)
    disk_cache.close(SOON_S)
    assert disk_cache.take_failures() == []
    assert len(files(folder)) == 1
    for path in (folder, *folder.iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_what_a_killed_process_left_half_written_is_removed_once_it_is_old(tmp_path: Path) -> None:
    fill(tmp_path, [1])
    (own,) = tmp_path.iterdir()
    for name in ("old.partial", "new.partial"):
        (own / name).write_bytes(b"half")
    os.utime(own / "old.partial", (1, 1))
    disk_cache = open_folder(tmp_path)
    assert (len(disk_cache.found()), disk_cache.take_failures()) == (1, [])
    assert sorted(path.suffix for path in own.iterdir()) == [".page", ".partial"]
    disk_cache.close(SOON_S)


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(HearthError, match="this user's own") as caught:
        open_folder(tmp_path)
    assert (caught.value.code, caught.value.field) == ("invalid_value", "prefix_folder")


def test_a_folder_that_cannot_be_had_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(HearthError, match="cannot be used") as caught:
        open_folder(tmp_path / "file")
    assert (caught.value.code, caught.value.field) == ("invalid_value", "prefix_folder")


@given(st.data())
def test_no_bytes_on_disk_are_taken_for_a_page_that_they_are_not(data: st.DataObject) -> None:
    """Any change of a file: what is read is the page as it was written, or an error."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (page,) = fill(folder, [1])
        (path,) = files(folder)
        held = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 3))):
            begin = data.draw(st.integers(0, len(held)))
            end = begin + data.draw(st.integers(0, 8))
            held[begin:end] = data.draw(st.binary(max_size=8))
        path.write_bytes(held)
        disk_cache = open_folder(folder)
        for stored in disk_cache.found():
            assert stored[:4] == (ROOTS[0], ROOTS[0], page.tokens, False)
        with suppress(HearthError):
            assert disk_cache.read(page) == DATA
        disk_cache.close(SOON_S)
