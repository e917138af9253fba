from pathlib import Path

import pytest
from click.testing import CliRunner

from hearth.daemon.cli import adapter as module
from hearth.daemon.control.messages import AdapterAdded, AddAdapter
from hearth.daemon.shipped_files import ADAPTERS, MODELS, PICTURE, shipped_model, shipped_picture


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[AddAdapter]:
    found: list[AddAdapter] = []

    def ask(request: AddAdapter, *_: object) -> AdapterAdded:
        found.append(request)
        return AdapterAdded(request.name, 8, "hub/home", 9, "trained for [another]")

    monkeypatch.setattr(module, "ask", ask)
    return found


@pytest.mark.parametrize("name", ["spoken", "careful"])
def test_a_shipped_adapter_is_found_by_its_name(asked: list[AddAdapter], name: str) -> None:
    result = CliRunner().invoke(module.adapter, ["add", name, "--socket", "/s"])
    assert result.exit_code == 0
    assert (Path(asked[0].folder) / "adapter_config.json").is_file()
    assert "note trained for [another]" in result.stderr


def test_another_adapter_needs_its_folder(asked: list[AddAdapter]) -> None:
    result = CliRunner().invoke(module.adapter, ["add", "terse"])
    assert (result.exit_code, asked) == (2, [])
    assert "spoken and careful alone ship with Hearth" in result.stderr


def test_what_lies_there_comes_before_a_shipped_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shipped_model(Path("home")) == MODELS["home"]
    assert shipped_picture(Path("scene.jpg")) == PICTURE
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home").mkdir()
    (tmp_path / "scene.jpg").touch()
    assert shipped_model(Path("home")) == Path("home")
    assert shipped_picture(Path("scene.jpg")) == Path("scene.jpg")
    assert all((folder / "adapter_config.json").is_file() for folder in ADAPTERS.values())
    assert all((folder / "config.json").is_file() for folder in MODELS.values())
