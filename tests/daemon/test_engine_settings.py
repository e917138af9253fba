from pathlib import Path

import pytest
from msgspec import structs

from hearth.daemon.configuration.settings import Settings, settings_of
from hearth.daemon.engine_settings import runtime_options
from hearth.runtime.errors import HearthError


def test_the_runtime_is_given_its_section_with_paths_and_the_memory_of_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path))
    settings = settings_of(
        threads=13, weights="w", images_in_flight_bytes=1 << 21, image_cache_bytes=1 << 20
    )
    assert runtime_options(settings) == structs.replace(
        settings.runtime,
        weights=str(Path.cwd() / "w"),
        adapters=str(tmp_path / "adapters"),
        image_memory=3 << 20,
    )


def test_the_prefix_cache_is_set_under_the_same_names(tmp_path: Path) -> None:
    assert runtime_options(Settings()).prefix_folder == ""
    settings = settings_of(
        prefix_cache_bytes=1, prefix_host_bytes=2, prefix_disk_bytes=3, prefix_folder=str(tmp_path)
    )
    options = runtime_options(settings)
    assert (options.prefix_cache_bytes, options.prefix_host_bytes) == (1, 2)
    assert (options.prefix_disk_bytes, options.prefix_folder) == (3, str(tmp_path))


def test_pages_are_spilled_to_the_cache_where_no_folder_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEARTH_CACHE", str(tmp_path))
    options = runtime_options(settings_of(prefix_disk_bytes=1))
    assert options.prefix_folder == str(tmp_path / "prefix")


@pytest.mark.parametrize("name", ["prefix_host_bytes", "prefix_disk_bytes"])
def test_what_takes_from_a_prefix_cache_is_refused_where_there_is_none(name: str) -> None:
    with pytest.raises(HearthError, match="prefix_cache_bytes, which is 0") as caught:
        runtime_options(settings_of(prefix_cache_bytes=0, **{name: 1}))
    assert (caught.value.code, caught.value.field) == ("invalid_value", name)
