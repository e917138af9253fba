"""What does not fit an engine is refused by name, and nothing of it is served."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hearth.runtime.config import WEIGHTS_FILE
from hearth.runtime.engine_folder import LAYOUT_FILE
from hearth.runtime.errors import HearthError
from hearth.runtime.export.export import export_weights
from hearth.runtime.weights.weights_file import load_layout, open_weights
from tests.runtime.export.hugging_face import shallow_model
from tests.runtime.weights.external_models import export, generated, tuned, with_header

NORM = "model.norm"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    return export(shallow_model("qwen3", folder / "model"), folder / "engine")


@pytest.fixture
def weights(engine: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copy(engine / WEIGHTS_FILE, tmp_path / "given.safetensors"))


def refusal(engine: Path, weights: Path | None, **options: Any) -> HearthError:
    with pytest.raises(HearthError) as caught:
        generated(engine, weights="" if weights is None else str(weights), **options)
    return caught.value


def renamed(header: dict[str, Any]) -> None:
    header["model.nothing"] = header.pop(NORM)


def added(header: dict[str, Any]) -> None:
    header["model.spare"] = header[NORM]


def reshaped(header: dict[str, Any]) -> None:
    header[NORM]["shape"] = [1, *header[NORM]["shape"]]


def retyped(header: dict[str, Any]) -> None:
    header[NORM]["dtype"] = "I32"


def moved(header: dict[str, Any]) -> None:
    header[NORM]["data_offsets"] = [place - 4 for place in header[NORM]["data_offsets"]]


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        (renamed, NORM, "lacks the tensor"),
        (added, "model.spare", "which the engine does not take"),
        (reshaped, NORM, "the engine takes F32"),
        (retyped, NORM, "the engine takes F32"),
        (moved, NORM, "does not lie where"),
        (lambda header: header.pop("__metadata__"), "given.safetensors", "no file of external"),
        (
            lambda header: header["__metadata__"].update(format="hearth-weights-0"),
            "given.safetensors",
            "another version",
        ),
    ],
)
@pytest.mark.parametrize("verify", [True, False])
def test_a_tensor_that_does_not_fit_is_named(
    engine: Path,
    weights: Path,
    change: Callable[[dict[str, Any]], object],
    field: str,
    words: str,
    *,
    verify: bool,
) -> None:
    with_header(weights, change)
    given = refusal(engine, weights, verify=verify)
    assert (given.code, given.field) == ("weights_invalid", field)
    assert words in given.message


def test_a_file_that_is_missing_cut_or_something_else_is_named(
    engine: Path, weights: Path, tmp_path: Path
) -> None:
    whole = weights.read_bytes()
    missing = refusal(engine, tmp_path / "missing.safetensors")
    assert (missing.code, missing.field) == ("weights_invalid", "missing.safetensors")
    for kept in (0, 4, 100, len(whole) - 1):
        weights.write_bytes(whole[:kept])
        given = refusal(engine, weights)
        assert (given.code, given.field) == ("weights_invalid", weights.name), kept
    weights.write_bytes(whole + b"x")
    assert "bytes instead of" in refusal(engine, weights).message
    length = int.from_bytes(whole[:8], "little")
    head = whole[8 : 8 + length].rstrip()
    twice = head[:-1] + b',"__metadata__":{"format":"other"}}'
    weights.write_bytes(whole[:8] + twice.ljust(length) + whole[8 + length :])
    assert "no file of external weights" in refusal(engine, weights).message
    folder = refusal(engine, tmp_path)
    assert (folder.code, folder.field) == ("weights_invalid", tmp_path.name)


def test_a_byte_that_was_changed_is_found_where_files_are_verified(
    engine: Path, weights: Path
) -> None:
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    given = refusal(engine, weights)
    assert (given.code, given.field) == ("weights_invalid", weights.name)
    assert "was changed" in given.message


def test_the_folders_own_file_is_not_taken_for_another(engine: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(engine, tmp_path / "engine"))
    model = tuned(shallow_model("qwen3", tmp_path / "model"), tmp_path / "other")
    (copy / WEIGHTS_FILE).unlink()
    export_weights(model, engine, copy / WEIGHTS_FILE)
    # The size of both is the same, so that without digests only the head tells.
    given = refusal(copy, None, verify=False)
    assert (given.code, given.field) == ("engine_corrupt", WEIGHTS_FILE)
    (copy / WEIGHTS_FILE).unlink()
    given = refusal(copy, None)
    assert (given.code, given.field) == ("engine_corrupt", WEIGHTS_FILE)


@settings(max_examples=150, deadline=None)
@given(
    st.one_of(
        st.binary(max_size=200),
        st.tuples(st.integers(0, 6000), st.binary(min_size=1, max_size=12)),
    )
)
def test_whatever_the_head_of_a_file_says_it_is_read_or_refused(
    engine: Path, damage: bytes | tuple[int, bytes]
) -> None:
    layout, path = load_layout(engine), engine.parent / "damaged"
    data = bytearray((engine / WEIGHTS_FILE).read_bytes())
    if isinstance(damage, bytes):
        data[8 : 8 + len(damage)] = damage
    else:
        data[damage[0] : damage[0] + len(damage[1])] = damage[1]
    path.write_bytes(data)
    refused = None
    try:
        open_weights(path, layout)
    except HearthError as error:
        refused = error
    assert refused is None or (refused.code == "weights_invalid" and refused.field)


def test_a_damaged_list_is_named(engine: Path, weights: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(engine, tmp_path / "engine"))
    path = copy / LAYOUT_FILE
    path.write_bytes(path.read_bytes()[:-1] + b" ")
    given = refusal(copy, weights, verify=False)
    assert (given.code, given.field) == ("engine_corrupt", LAYOUT_FILE)


def test_a_simulated_engine_has_no_weights(engine: Path, weights: Path) -> None:
    given = refusal(engine, weights, engine_kind="simulated", threads=0)
    assert (given.code, given.field) == ("unsupported_option", "weights")
