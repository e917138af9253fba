"""Pages of the prefix cache that go to disk, and what is made of those that are found there."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from hearth.runtime.errors import HearthError
from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.kv_cache.disk_cache import HEAD_BYTES
from tests.references import reference_folder
from tests.runtime.generation.prefix_rows import (
    check_equal,
    needs_native,
    open_pages,
    prompt,
    row,
    run,
)

pytestmark = needs_native
TEXT = prompt(75)
REST = len(TEXT) - 1

Open = Callable[..., LLMInferenceRuntime]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("disk") / "qwen3"
    export_model(reference_folder("qwen3"), target, ExportOptions(dialect="native"))
    return target


@pytest.fixture
def opened(folder: Path, tmp_path: Path) -> Open:
    """Opens a runtime with room for pages in memory, and for many on disk."""

    def opened(pages: int = 20) -> LLMInferenceRuntime:
        return open_with_disk(folder, tmp_path / "pages", pages)

    return opened


def open_with_disk(folder: Path, pages_in: Path, pages: int = 20) -> LLMInferenceRuntime:
    return open_pages(folder, pages, prefix_disk_bytes=1 << 22, prefix_folder=str(pages_in))


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.page"))


def reused(runtime: LLMInferenceRuntime) -> int:
    """How much of the text comes from the cache; the reply has to be that without it."""
    found = run(runtime, row(TEXT))
    (wanted,) = run(runtime, row(TEXT, cache="bypass")).tokens.values()
    (tokens,) = found.tokens.values()
    check_equal(tokens, wanted, exact=True)
    return sum(found.cached.values())


def test_what_was_computed_before_a_restart_is_not_computed_again(opened: Open) -> None:
    with closing(opened()) as runtime:
        assert reused(runtime) == 0
    with closing(opened()) as runtime:
        assert runtime.prefix_metrics is not None
        assert runtime.prefix_metrics.bytes["device"] == 0
        assert reused(runtime) == REST
        # They lie in memory now as well.
        assert runtime.prefix_metrics.bytes["device"] == runtime.prefix_metrics.bytes["disk"]
        assert runtime.take_failures() == []


def test_another_salt_finds_nothing_on_disk(opened: Open) -> None:
    with closing(opened()) as runtime:
        run(runtime, row(TEXT, cache_salt="ours"))
    with closing(opened()) as runtime:
        assert run(runtime, row(TEXT, cache_salt="theirs")).cached == {}
        assert run(runtime, row(TEXT)).cached == {}
        assert sum(run(runtime, row(TEXT, cache_salt="ours")).cached.values()) == REST


def test_what_leaves_memory_comes_back_from_the_disk(opened: Open) -> None:
    with closing(opened(pages=4)) as runtime:
        assert reused(runtime) == 0
        for seed in range(1, 4):
            run(runtime, row(prompt(100, seed)))
        metrics = runtime.prefix_metrics
        assert metrics is not None
        assert metrics.bytes["disk"] > metrics.bytes["device"]
        assert reused(runtime) == REST
        assert (metrics.evicted, metrics.damaged) == (0, 0)


@pytest.mark.parametrize(
    ("begin", "data", "words"),
    [
        (HEAD_BYTES + 5, b"damage", "is damaged"),
        (8, b"\1", "is of version 1 and 2 is read here"),
        (0, b"GGUF", "is no page of the prefix cache"),
    ],
)
def test_damaged_files_are_named_and_removed_and_serve_nothing(
    opened: Open, tmp_path: Path, begin: int, data: bytes, words: str
) -> None:
    with closing(opened()) as runtime:
        reused(runtime)
    before = files(tmp_path)
    for path in before:
        held = path.read_bytes()
        path.write_bytes(held[:begin] + data + held[begin + len(data) :])
    with closing(opened()) as runtime:
        assert reused(runtime) == 0
        failures = runtime.take_failures()
        assert failures
        for failure in failures:
            assert (failure.code, words in failure.message) == ("spill_invalid", True)
            assert failure.field in {path.name for path in before}
        assert runtime.take_failures() == []
        assert reused(runtime) == REST


def test_pages_of_another_model_are_not_taken_for_ones_own(opened: Open, tmp_path: Path) -> None:
    """The same prompt has the same file names by another engine, were its folder not another."""
    other = tmp_path / "other"
    options = ExportOptions(dialect="native", quantization="int4")
    export_model(reference_folder("qwen3"), other, options)
    with closing(open_with_disk(other, tmp_path / "pages")) as runtime:
        assert reused(runtime) == 0
    theirs = files(tmp_path)
    with closing(opened()) as runtime:
        assert reused(runtime) == 0
    (own,) = {path.parent for path in files(tmp_path)} - {path.parent for path in theirs}
    for path in files(own):
        path.unlink()
    for path in theirs:
        path.rename(own / path.name)
    with closing(opened()) as runtime:
        assert reused(runtime) == 0
        assert "belongs to another engine" in runtime.take_failures()[0].message


def test_a_folder_that_cannot_be_used_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(HearthError) as caught:
        open_with_disk(folder, tmp_path / "file")
    assert (caught.value.code, caught.value.field) == ("invalid_value", "prefix_folder")
