from pathlib import Path

import pytest

from hearth_http.command import main
from hearth_http.keys import KeysInvalid, key_of, read_keys


def test_keys_are_drawn_shown_once_and_taken_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys"
    keys = ["--keys", str(file)]
    secrets = []
    for name in ("one", "two", "one"):
        assert main(["add", name, *keys]) == 0
        secrets.append(capsys.readouterr().out.strip())
    first, two, one = secrets
    listed = read_keys(file)
    names = [key.name if (key := key_of(listed, secret)) else None for secret in secrets]
    assert names == [None, "two", "one"]
    assert not {first, two, one} & set(file.read_text().split())
    assert file.stat().st_mode & 0o777 == 0o600
    assert main(["remove", "two", *keys]) == 0
    assert key_of(read_keys(file), two) is None
    assert main(["remove", "two", *keys]) == 1
    assert f"there is no key two in {file}" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, "ä"])
def test_a_name_that_cannot_be_listed(tmp_path: Path, name: str) -> None:
    assert main(["add", name, "--keys", str(tmp_path / "keys")]) == 1


@pytest.mark.parametrize("line", ["one", "one abc", "a b " + "0" * 64, "\xff"])
def test_a_file_that_has_no_keys(tmp_path: Path, line: str) -> None:
    file = tmp_path / "keys"
    file.write_bytes(line.encode("latin-1"))
    with pytest.raises(KeysInvalid):
        read_keys(file)
    assert main(["serve", "--keys", str(file)]) == 1


@pytest.mark.parametrize(
    "flags",
    [
        ["--host", "0.0.0.0"],  # noqa: S104 - what is refused
        ["--port", "70000"],
        ["--port", "0", "--unix", "x"],
        ["--connections", "0"],
        ["add", "one"],
    ],
)
def test_flags_that_are_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(flags)
    assert caught.value.code == 2
