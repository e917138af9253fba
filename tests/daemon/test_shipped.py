import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from hearth.daemon import shipped
from hearth.daemon.configuration.settings import Settings, settings_of
from hearth.daemon.shipped import engine_folder, same_engine, shipped_engine, wants_kernels
from hearth.runtime.errors import HearthError
from hearth.runtime.export import ExportOptions
from hearth.runtime.generation.deployment import load_deployment
from hearth.runtime.options import EagleDraftingConfig, RuntimeOptions, SpeculationOptions


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return model(tmp_path / "home")


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return model(tmp_path / "home-draft")


def model(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"1")
    return folder


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """An exporter that only makes the folder, after a moment; what it made counts as whole."""
    made: list[Path] = []
    monkeypatch.setattr(shipped, "_fault", lambda folder: None if folder in made else "missing")

    def export(_source: Path, target: Path, options: ExportOptions, _progress: object) -> Any:
        time.sleep(0.05)
        assert options.draft is not None
        assert options.draft.folder.name == "home-draft"
        made.append(target)
        target.mkdir(parents=True)
        (target / "base_config.json").write_text("{}")

    monkeypatch.setattr("hearth.runtime.export.export_model", export)
    return made


def test_a_named_folder_is_taken_from_where_the_user_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/x")
    assert engine_folder("/engines/x") == Path("/engines/x")
    assert engine_folder("x/../y") == tmp_path / "y"
    assert engine_folder("~/x") == Path("/home/x/x")


def test_the_first_use_exports_and_the_second_does_not(
    source: Path, draft: Path, tmp_path: Path, exports: list[Path]
) -> None:
    first = shipped_engine(source, draft, tmp_path / "cache")
    assert shipped_engine(source, draft, tmp_path / "cache") == first
    assert exports == [first]
    assert first.name == "home"


def test_another_model_or_version_gets_another_folder(
    source: Path, draft: Path, tmp_path: Path, exports: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped_engine(source, draft, tmp_path / "cache")
    (source / "model.safetensors").write_bytes(b"2")
    shipped_engine(source, draft, tmp_path / "cache")
    (draft / "model.safetensors").write_bytes(b"2")
    shipped_engine(source, draft, tmp_path / "cache")
    monkeypatch.setattr(shipped, "VERSION", "9.9")
    shipped_engine(source, draft, tmp_path / "cache")
    assert len(set(exports)) == 4


def test_two_that_ask_at_once_share_one_export(
    source: Path, draft: Path, tmp_path: Path, exports: list[Path]
) -> None:
    threads = [
        threading.Thread(target=shipped_engine, args=(source, draft, tmp_path / "cache"))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(exports) == 1


@pytest.mark.parametrize(
    "harm", ["cut", "changed", "unreadable configuration", "no configuration", "no draft"]
)
def test_a_damaged_engine_is_built_again_and_that_is_said_in_one_line(
    tmp_path: Path, harm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shipped_engine(shipped.SOURCE, shipped.DRAFT, tmp_path)
    assert shipped_engine(shipped.SOURCE, shipped.DRAFT, tmp_path) == folder
    assert capsys.readouterr().err == ""
    data = folder / "model.onnx.data"
    if harm == "cut":
        data.write_bytes(data.read_bytes()[:-1])
    elif harm == "changed":
        data.write_bytes(data.read_bytes()[:-1] + b"?")
    elif harm == "unreadable configuration":
        (folder / "base_config.json").write_text("{")
    elif harm == "no configuration":
        (folder / "base_config.json").unlink()
    else:
        shutil.rmtree(folder / "draft")
    assert shipped_engine(shipped.SOURCE, shipped.DRAFT, tmp_path) == folder
    said = capsys.readouterr().err
    assert said.startswith("the engine of the shipped model is built again: ")
    assert said.count("\n") == 1
    assert "export the model" not in said
    load_deployment(folder, RuntimeOptions())


def test_kernels_have_a_folder_of_their_own_and_ask_for_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shipped_engine(shipped.SOURCE, shipped.DRAFT, tmp_path)

    def ask() -> str:
        raise HearthError("engine_incompatible", "there is no engine library")

    for module in ("hearth.daemon.shipped", "hearth.runtime.export.options"):
        monkeypatch.setattr(f"{module}.installed_version", ask)
    kernels = shipped_engine(shipped.SOURCE, shipped.DRAFT, tmp_path, kernels=True)
    assert kernels != folder
    assert shipped_engine(shipped.SOURCE, shipped.DRAFT, tmp_path, kernels=True) == kernels
    options = RuntimeOptions(speculation=SpeculationOptions(method="eagle"))
    found = load_deployment(kernels, options)
    assert (found.base.backend, found.base.dtype, found.method) == ("kernels", "float16", "eagle")
    assert found.drafting == EagleDraftingConfig(
        drafting_top_k=1, drafting_step=7, verify_tree_size=8
    )


@pytest.mark.parametrize(
    ("device", "kind", "kernels"),
    [
        ("auto", "auto", False),
        ("cpu", "auto", False),
        ("cuda", "auto", True),
        ("cuda", "onnxruntime", False),
        ("auto", "kernels", True),
    ],
)
def test_the_shipped_model_is_served_by_kernels_on_a_gpu(
    device: Any, kind: Any, *, kernels: bool
) -> None:
    settings = settings_of(device=device, engine_kind=kind)
    assert wants_kernels(settings) is kernels
    assert same_engine(settings, Settings()) is not kernels
    named = structs.replace(settings, engine="x")
    assert same_engine(named, settings_of(engine="x"))
    assert not same_engine(named, settings)


@pytest.mark.parametrize("absent", ["home", "home-draft"])
def test_without_the_shipped_model_or_its_draft_the_message_says_what_to_do(
    source: Path, draft: Path, tmp_path: Path, absent: str
) -> None:
    (source if absent == "home" else draft).joinpath("config.json").unlink()
    with pytest.raises(HearthError, match=f"{absent}: give an engine folder") as caught:
        shipped_engine(source, draft, tmp_path)
    assert caught.value.code == "engine_missing"


def test_the_model_and_the_draft_that_ship_are_there() -> None:
    assert (shipped.SOURCE / "config.json").is_file()
    assert (shipped.DRAFT / "config.json").is_file()


def test_a_cache_that_cannot_be_written_is_named(source: Path, draft: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HearthError, match="HEARTH_CACHE"):
        shipped_engine(source, draft, tmp_path / "file" / "cache")
