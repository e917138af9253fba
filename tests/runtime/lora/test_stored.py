"""Whatever stands in an adapter's files, it is read as it was or refused in our words."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest

from hearth.runtime.errors import HearthError
from hearth.runtime.lora.lora_manager import BlockLayout
from hearth.runtime.lora.stored import (
    AdapterRecord,
    read_adapter,
    read_peft,
    read_record,
    store_adapter,
)
from hearth.runtime.tensors.lora import lora_inputs
from hearth.runtime.tensors.tensor import Tensor
from tests.low_rank_models import Array
from tests.peft_models import change_fields, change_tensors, write_peft
from tests.runtime.lora.adapter_configs import BASE, adapter_config, refusal


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    store_adapter(write_peft(BASE, tmp_path / "peft"), adapter_config(), tmp_path / "stored")
    return tmp_path / "stored"


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_what_is_stored_comes_back(tmp_path: Path, dtype: str) -> None:
    config = adapter_config(dtype=dtype)
    folder = write_peft(BASE, tmp_path / "peft", rank=4, targets="q down")
    record = store_adapter(folder, config, tmp_path / "stored")
    assert record == read_record(tmp_path / "stored")
    assert (record.rank, record.base, record.source) == (4, "qwen3", str(folder))
    found, wanted = read_adapter(tmp_path / "stored", config), read_peft(folder, config)
    assert found[:2] == wanted[:2]
    assert found.digest == record.sha256
    assert set(found.parts) == set(wanted.parts)
    own = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    for place, part in wanted.parts.items():
        for one, other in zip(found.parts[place], part, strict=True):
            assert one.dtype == own
            assert np.array_equal(one, other)


def test_parts_of_several_ranks_are_stored_and_bound(tmp_path: Path) -> None:
    config = adapter_config()
    folder = write_peft(BASE, tmp_path / "peft", rank=4, targets="q v")

    def shorten(tensors: dict[str, Array]) -> None:
        for name, one in list(tensors.items()):
            if "v_proj" in name:
                tensors[name] = one[:2].copy() if "lora_A" in name else one[:, :2].copy()

    change_tensors(folder, shorten)
    change_fields(folder, rank_pattern={"v_proj": 2})
    assert store_adapter(folder, config, tmp_path / "stored").rank == 4
    adapter = read_adapter(tmp_path / "stored", config)
    assert {part.a.shape[1] for part in adapter.parts.values()} == {2, 4}
    inputs, dtype = lora_inputs(config), np.dtype(np.float32)
    layout = BlockLayout(inputs, 4, dtype, adapter.parts)
    bound = layout.tensors(Tensor("adapter", layout.filled(adapter)))
    for pair in (one for one in inputs if one.layer == 1):
        for index, target in enumerate(pair.targets):
            if target in "qv":
                part = adapter.parts[1, target]
                a = bound[pair.a].array[:, index * 4 : index * 4 + 4]
                b = bound[pair.b].array[index * 4 : index * 4 + 4, pair.columns[index]]
                np.testing.assert_allclose(a @ b, part.a @ part.b, atol=1e-6)


def test_a_folder_of_peft_is_read_as_well(tmp_path: Path) -> None:
    folder = write_peft(BASE, tmp_path / "peft")
    assert read_adapter(folder, adapter_config()).rank == 8


def test_files_are_the_owners_alone(stored: Path) -> None:
    modes = {path.name: path.stat().st_mode & 0o777 for path in (stored, *stored.iterdir())}
    assert modes == {"stored": 0o700, "adapter.json": 0o600, "adapter.safetensors": 0o600}


def test_nothing_is_left_of_what_is_refused(tmp_path: Path, stored: Path) -> None:
    change_fields(tmp_path / "peft", use_dora=True)
    with pytest.raises(HearthError, match="use_dora"):
        store_adapter(tmp_path / "peft", adapter_config(), tmp_path / "other")
    change_fields(tmp_path / "peft", use_dora=False)
    with pytest.raises(HearthError, match="exists already"):
        store_adapter(tmp_path / "peft", adapter_config(), stored)
    assert {path.name for path in tmp_path.iterdir()} == {"peft", "stored"}


@pytest.mark.parametrize("name", ["adapter.json", "adapter.safetensors"])
@pytest.mark.parametrize("content", [None, b"", b"\xff{"])
def test_a_damaged_file_is_refused_by_name(stored: Path, name: str, content: bytes | None) -> None:
    (stored / name).unlink()
    if content is not None:
        (stored / name).write_bytes(content)
    # Without its record it is no stored adapter, and no one of PEFT's.
    missing = name == "adapter.json" and content is None
    refused(stored, "adapter_config.json" if missing else name)


def test_one_changed_bit_is_noticed(stored: Path) -> None:
    path = stored / "adapter.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    refused(stored, "adapter.safetensors")


def test_tensors_of_another_adapter_are_noticed(tmp_path: Path, stored: Path) -> None:
    other = write_peft(BASE, tmp_path / "other", rank=4)
    store_adapter(other, adapter_config(), tmp_path / "swapped")
    (tmp_path / "swapped" / "adapter.safetensors").replace(stored / "adapter.safetensors")
    refused(stored, "adapter.safetensors")
    change_record(stored, **read_files(tmp_path / "swapped"))
    refused(stored, "adapter.safetensors")


@pytest.mark.parametrize(
    "fields",
    [{"hidden_size": 16}, {"num_decoder_layers": 1}, {"dtype": "float16"}],
)
def test_an_engine_of_another_shape_or_type_is_refused(stored: Path, fields: Any) -> None:
    config = msgspec.structs.replace(adapter_config(), **fields)
    with pytest.raises(HearthError) as caught:
        read_adapter(stored, config)
    assert (caught.value.code, caught.value.field) == ("adapter_invalid", "shapes")


def test_an_engine_of_other_projections_takes_what_it_has_inputs_for(tmp_path: Path) -> None:
    stored, config = tmp_path / "stored", adapter_config()
    store_adapter(write_peft(BASE, tmp_path / "peft", targets="q v"), config, stored)
    some = msgspec.structs.replace(config, lora_targets=("q", "v"))
    assert len(read_adapter(stored, some).parts) == len(read_adapter(stored, config).parts)
    with pytest.raises(HearthError, match="no place") as caught:
        read_adapter(stored, msgspec.structs.replace(config, lora_targets=("q",)))
    assert (caught.value.code, str(caught.value.field)[:9]) == ("adapter_invalid", "lora_a_v_")


def test_an_engine_of_another_name_takes_it(stored: Path) -> None:
    assert read_adapter(stored, adapter_config(model_name="hf")).base == BASE.name


def test_an_engine_of_a_smaller_rank_is_refused(stored: Path) -> None:
    with pytest.raises(HearthError) as caught:
        read_adapter(stored, adapter_config(4))
    assert (caught.value.code, caught.value.field) == ("adapter_invalid", "r")


def read_files(folder: Path) -> dict[str, Any]:
    """What the record says of the file, of another adapter."""
    record = read_record(folder)
    return {"bytes": record.bytes, "sha256": record.sha256}


def change_record(folder: Path, **fields: Any) -> None:
    path = folder / "adapter.json"
    record = msgspec.json.decode(path.read_bytes(), type=AdapterRecord)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(record, **fields)))


def refused(folder: Path, field: str) -> None:
    with pytest.raises(HearthError) as caught:
        read_adapter(folder, adapter_config())
    assert (caught.value.code, caught.value.field) == ("adapter_invalid", field)


ROUNDS = 40
VALUES: tuple[Any, ...] = (None, True, -1, 0, 1e308, "", "x", [], [[]], {}, {"r": {}})


@pytest.mark.parametrize("form", ["peft", "stored"])
def test_changed_bytes(tmp_path: Path, form: str) -> None:
    folder = write_peft(BASE, tmp_path / "peft")
    if form == "stored":
        store_adapter(folder, adapter_config(), folder := tmp_path / "stored")
    random = np.random.default_rng(7)
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        # Headers are where the meaning is.
        reach = min(len(whole), 4000)
        for _ in range(ROUNDS):
            data = bytearray(whole)
            for place in random.integers(0, reach, random.integers(1, 4)):
                data[place] = random.integers(256)
            path.write_bytes(data[: random.integers(len(data))] if random.random() < 0.2 else data)
            read(folder)
        path.write_bytes(whole)
    assert read(folder)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter.json"])
def test_changed_fields(tmp_path: Path, name: str) -> None:
    folder = write_peft(BASE, tmp_path / "peft")
    if name == "adapter.json":
        store_adapter(folder, adapter_config(), folder := tmp_path / "stored")
    fields = json.loads((folder / name).read_text())
    for field in fields:
        for value in VALUES:
            (folder / name).write_text(json.dumps(fields | {field: value}))
            read(folder)


def read(folder: Path) -> bool:
    """Whether the adapter is served."""
    refused = refusal(read_adapter, folder)
    assert refused is None or (refused.code == "adapter_invalid" and refused.field)
    return refused is None
