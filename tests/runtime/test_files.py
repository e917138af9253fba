import hashlib
from pathlib import Path

import pytest

from hearth.runtime import files as module
from hearth.runtime.errors import HearthError
from hearth.runtime.files import BY_PIECES, cache_folder, file_digest, has_digest, record_digest


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 64)
    monkeypatch.setattr(module, "_BUFFER_BYTES", 24)


def stored(folder: Path, size: int) -> tuple[Path, bytes]:
    data = bytes(number * 7 % 256 for number in range(size))
    (folder / "file").write_bytes(data)
    return folder / "file", data


@pytest.mark.parametrize("size", [0, 1, 100, 128])
def test_a_file_of_few_pieces_has_its_plain_digest(tmp_path: Path, size: int) -> None:
    path, data = stored(tmp_path, size)
    assert record_digest(path) == file_digest(path) == hashlib.sha256(data).hexdigest()
    assert has_digest(path, record_digest(path))


@pytest.mark.parametrize("begin", [0, 10])
@pytest.mark.parametrize("size", [139, 192, 1000])
def test_a_large_one_has_that_of_its_pieces(tmp_path: Path, size: int, begin: int) -> None:
    path, data = stored(tmp_path, size)
    parts = [data[place : place + 64] for place in range(begin, size, 64)]
    wanted = hashlib.sha256(b"".join(hashlib.sha256(one).digest() for one in parts)).hexdigest()
    found = record_digest(path, begin=begin)
    assert found == BY_PIECES + wanted
    heard: list[int] = []
    assert has_digest(path, found, heard.append, begin=begin)
    assert sum(heard) == size - begin
    # Folders of before have the plain one.
    assert has_digest(path, hashlib.sha256(data[begin:]).hexdigest(), begin=begin)


@pytest.mark.parametrize("size", [100, 1000])
def test_another_byte_anywhere_is_another_digest(tmp_path: Path, size: int) -> None:
    path, data = stored(tmp_path, size)
    found = record_digest(path)
    for place in (0, size // 2, size - 1):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        assert not has_digest(path, found)
    for other in (data[:-1], data + b"\0"):
        path.write_bytes(other)
        assert not has_digest(path, found)
    path.write_bytes(data)
    assert has_digest(path, found)


def test_the_cache_follows_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder({"HEARTH_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert cache_folder({"XDG_CACHE_HOME": "/b"}) == Path("/b/hearth")
    monkeypatch.setenv("HOME", "/c")
    assert cache_folder({}) == Path("/c/.cache/hearth")
    monkeypatch.setenv("HEARTH_CACHE", "/d")
    assert cache_folder() == Path("/d")


def homeless() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(HearthError, match="set HEARTH_CACHE") as caught:
        cache_folder({})
    assert (caught.value.code, caught.value.field) == ("invalid_value", "HEARTH_CACHE")
