from pathlib import Path

import pytest

from hearth.runtime.errors import HearthError
from hearth.runtime.files import cache_folder


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
