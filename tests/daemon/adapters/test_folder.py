from pathlib import Path

import msgspec
import pytest

from hearth.daemon.adapters.store import AdapterFolder
from hearth.daemon.configuration.places import adapters_folder
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.simulated_engine import simulated_config

CONFIG = simulated_config()


@pytest.mark.parametrize(
    ("setting", "environ", "place"),
    [
        ("/k", {"STATE_DIRECTORY": "/s"}, "/k"),
        ("", {"STATE_DIRECTORY": "/s:/t", "XDG_STATE_HOME": "/x"}, "/s/adapters"),
        ("", {"XDG_STATE_HOME": "/x"}, "/x/hearth/adapters"),
        ("", {}, str(Path.home() / ".local/state/hearth/adapters")),
    ],
)
def test_where_adapters_lie(setting: str, environ: dict[str, str], place: str) -> None:
    assert adapters_folder(setting, environ) == Path(place)


def test_a_user_without_a_home_has_no_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(_kind: type[Path]) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", classmethod(homeless))
    assert AdapterFolder(adapters_folder("", {})).names == []
    assert adapters_folder("", {"XDG_STATE_HOME": "/s"}) == Path("/s/hearth/adapters")


def stored(folder: Path, name: str) -> Path:
    made = folder / name
    made.mkdir(parents=True)
    (made / "adapter.json").write_text("{")
    return made


def test_only_names_are_adapters(tmp_path: Path) -> None:
    assert AdapterFolder(tmp_path / "none").names == []
    for name in ("b", "a-1.x", ".going", "with space", "x" * 65):
        stored(tmp_path, name)
    (tmp_path / "notes").write_text("no folder")
    assert AdapterFolder(tmp_path).names == ["a-1.x", "b"]


@pytest.mark.parametrize("name", ["", ".", "..", "../a", "a/b", "-a", "a\0", "ä", "x" * 65, "a\n"])
def test_what_is_no_name_is_refused(tmp_path: Path, name: str) -> None:
    for act in (AdapterFolder(tmp_path).of, AdapterFolder(tmp_path).remove):
        with pytest.raises(HearthError) as caught:
            act(name)
        assert (caught.value.code, caught.value.field) == ("invalid_value", "name")


@pytest.mark.parametrize("source", ["", "a", "./a", "/a\0b"])
def test_what_is_no_place_is_refused(tmp_path: Path, source: str) -> None:
    with pytest.raises(HearthError) as caught:
        AdapterFolder(tmp_path).add("a", source, CONFIG)
    assert (caught.value.code, caught.value.field) == ("invalid_value", "folder")


def test_what_is_removed_leaves_nothing(tmp_path: Path) -> None:
    folder = AdapterFolder(tmp_path)
    stored(tmp_path, "a")
    folder.remove("a")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(HearthError) as caught:
        folder.remove("a")
    assert (caught.value.code, caught.value.field) == ("adapter_unknown", "name")


def test_a_damaged_record_is_told(tmp_path: Path) -> None:
    stored(tmp_path, "a")
    with pytest.raises(HearthError) as caught:
        AdapterFolder(tmp_path).record("a")
    assert caught.value.code == "adapter_invalid"


def test_an_engine_without_adapters_is_told_how_it_gets_them(tmp_path: Path) -> None:
    plain = msgspec.structs.replace(CONFIG, max_supported_lora_rank=0)
    source = tmp_path / "source"
    source.mkdir()
    (source / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}')
    with pytest.raises(HearthError, match="--max-lora-rank") as caught:
        AdapterFolder(tmp_path / "kept").add("a", str(source), plain)
    assert caught.value.code == "unsupported_option"
