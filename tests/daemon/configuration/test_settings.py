import errno
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.daemon.configuration.load import load_settings
from hearth.daemon.configuration.settings import SETTINGS, Settings, settings_of
from hearth.runtime.errors import HearthError


def write(folder: Path, text: str) -> Path:
    path = folder / "hearth.toml"
    path.write_text(text)
    return path


def refused(**arguments: object) -> HearthError:
    with pytest.raises(HearthError) as caught:
        load_settings(**arguments)  # type: ignore[arg-type] # each test gives its own
    return caught.value


def test_defaults_without_any_source(tmp_path: Path) -> None:
    assert load_settings(environ={}, system_file=tmp_path / "none.toml") == Settings()


def test_flags_win_over_environment_and_that_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "threads = 1\nmax_batch = 1\ncapacity = 1\nhold_s = 4")
    environ = {"HEARTH_MAX_BATCH": "2", "HEARTH_CAPACITY": "2"}
    settings = load_settings(path, environ, {"capacity": "3", "threads": None})
    assert settings == settings_of(threads=1, max_batch=2, capacity=3, hold_s=4.0)


def test_the_file_is_the_flag_s_then_the_variable_s_then_the_system_s(tmp_path: Path) -> None:
    system = write(tmp_path, "threads = 1")
    named = tmp_path / "named.toml"
    named.write_text("threads = 2")
    given_file = tmp_path / "given.toml"
    given_file.write_text("threads = 3")
    environ = {"HEARTH_CONFIG": str(named)}
    assert load_settings(environ={}, system_file=system).runtime.threads == 1
    assert load_settings(environ=environ, system_file=system).runtime.threads == 2
    assert load_settings(given_file, environ, system_file=system).runtime.threads == 3


def test_a_system_s_file_that_may_not_be_read_is_told_and_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = tmp_path / "hearth.toml"

    def closed(path: Path, *_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    # Whatever user runs this: its folder is closed.
    monkeypatch.setattr(Path, "is_file", closed)
    monkeypatch.setattr(Path, "read_text", closed)
    with pytest.raises(HearthError, match=r"hearth\.toml cannot be read: Permission denied"):
        load_settings(environ={}, system_file=system)


@pytest.mark.parametrize(
    ("text", "field", "words"),
    [
        ("max_batch = -1", "max_batch", "a whole number from 0 to 1024"),
        ("max_batch = '8'", "max_batch", "a whole number"),
        ("max_batch = true", "max_batch", "a whole number"),
        ("hold_s = nan", "hold_s", "a number above 0 to 3600"),
        ("hold_s = inf", "hold_s", "a number above 0 to 3600"),
        ("log_level = 'loud'", "log_level", "one of debug, error, info, warning"),
        ("spin = 1", "spin", "true or false"),
        ("batch = 8", "batch", "no such setting"),
        ("[engine]\npath = 'x'", "engine", "text"),
    ],
)
def test_a_wrong_value_names_field_file_and_what_is_allowed(
    tmp_path: Path, text: str, field: str, words: str
) -> None:
    path = write(tmp_path, text)
    error = refused(config=path, environ={})
    assert error.code == "invalid_value"
    assert error.field == field
    assert str(path) in error.message
    assert words in error.message


def test_a_wrong_variable_or_flag_is_named_as_its_user_wrote_it() -> None:
    assert "$HEARTH_HOLD_S" in refused(environ={"HEARTH_HOLD_S": "soon"}).message
    assert "$HEARTH_HOLDS" in refused(environ={"HEARTH_HOLDS": "1"}).message
    assert "--hold-s" in refused(environ={}, flags={"hold_s": "soon"}).message


@given(st.sampled_from(sorted(SETTINGS)), st.text(max_size=12))
def test_any_text_is_a_value_or_is_refused_by_name(name: str, value: str) -> None:
    try:
        load_settings(environ={}, flags={name: value})
    except HearthError as error:
        field = error.field
    else:
        field = name
    assert field == name


@pytest.mark.parametrize(
    ("environ", "text", "hint"),
    [
        ({}, "max_bacth = 2", "max_bacth: there is no such setting (nearest: max_batch)"),
        (
            {"HEARTH_THREAD": "2"},
            "",
            "$HEARTH_THREAD: there is no such setting (nearest: HEARTH_THREADS)",
        ),
        # What all names begin with makes none of them near.
        ({"HEARTH_PROXY": "8080"}, "", "$HEARTH_PROXY: there is no such setting"),
        ({"HEARTH_XYZ": "1"}, "", "$HEARTH_XYZ: there is no such setting"),
    ],
)
def test_the_nearest_name_of_an_unknown_setting_is_told(
    tmp_path: Path, environ: dict[str, str], text: str, hint: str
) -> None:
    path = tmp_path / "h.toml"
    path.write_text(text)
    with pytest.raises(HearthError) as caught:
        load_settings(path, environ)
    assert caught.value.message.endswith(hint)
