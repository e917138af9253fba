from pathlib import Path

import pytest

from hearth.daemon.install.reach import (
    HIDDEN,
    check_name,
    check_place,
    check_reach,
    own_command,
    own_parts,
)
from hearth.runtime.errors import HearthError


@pytest.fixture
def environment(short_folder: Path) -> Path:
    """The command of an environment that everybody can run; nothing on the way is closed."""
    command = short_folder / "env" / "bin" / "hearth"
    command.parent.mkdir(parents=True)
    command.write_text("")
    for path in (
        command,
        *(folder for folder in command.parents if short_folder in folder.parents),
    ):
        path.chmod(0o755)
    short_folder.chmod(0o755)
    return command


def refusal(command: Path, parts: list[Path], hidden: tuple[Path, ...] = ()) -> str:
    with pytest.raises(HearthError) as caught:
        check_reach(command, parts, hidden)
    assert (caught.value.code, caught.value.field) == ("invalid_value", "hearth")
    assert "python3 -m venv /opt/hearth" in caught.value.message
    return caught.value.message


def test_what_others_can_run_the_service_can(environment: Path) -> None:
    check_reach(environment, [environment], ())


def test_a_folder_that_is_closed_to_others_is_named(environment: Path) -> None:
    closed = environment.parent.parent
    closed.chmod(0o750)
    assert f"cannot use {environment} ({closed} is closed to others)" in refusal(environment, [])


def test_a_file_that_others_may_not_read_is_named(environment: Path) -> None:
    module = environment.with_name("module.py")
    module.touch(mode=0o640)
    assert f"({module} is closed to others)" in refusal(environment, [module])


def test_links_are_followed_to_where_they_lead(environment: Path) -> None:
    """As an environment's python is a link to the one that it was made of."""
    real = environment.parents[2] / "own" / "python" / "bin" / "python3"
    real.parent.mkdir(parents=True)
    real.touch(mode=0o755)
    alias = environment.with_name("alias")
    alias.symlink_to("../../own/python", target_is_directory=True)
    python = environment.with_name("python")
    python.symlink_to("alias/bin/python3")
    check_reach(environment, [python], ())
    home = environment.parents[2] / "own"
    assert "is hidden from it" in refusal(environment, [python], (home,))
    home.chmod(0o700)
    assert "own is closed to others" in refusal(environment, [python])


def test_a_home_that_lies_elsewhere_is_hidden_too(environment: Path) -> None:
    link = environment.parents[2] / "home"
    link.symlink_to("env", target_is_directory=True)
    assert "is hidden from it" in refusal(environment, [], (link,))


def test_a_command_that_is_not_there_is_refused(environment: Path) -> None:
    environment.chmod(0o644)
    assert f"there is no command {environment}" in refusal(environment, [])


@pytest.mark.parametrize("folder", HIDDEN)
def test_what_the_unit_hides_is_refused_in_images_too(folder: Path) -> None:
    with pytest.raises(HearthError, match="hidden"):
        check_place(folder / "env" / "bin" / "hearth")
    check_place(Path("/opt/hearth/bin/hearth"))


@pytest.mark.parametrize("name", ["bin/hearth", "/opt/my env/hearth", "/opt/%h/hearth", "/o$x/h"])
def test_a_unit_file_names_plain_paths_alone(name: str) -> None:
    with pytest.raises(HearthError, match="cannot stand in a unit file"):
        check_name(Path(name))
    check_name(Path("/opt/hearth-1.2/bin/hearth"))


def test_the_environment_that_runs_is_known() -> None:
    assert own_command().is_file()
    parts = own_parts()
    assert all(part.is_file() for part in parts)
    # An interpreter may have its library elsewhere than itself.
    assert [part for part in parts if part.name.startswith("libc.so")]
