from pathlib import Path

import numpy as np
import pytest
from msgspec import structs
from safetensors.numpy import save_file

from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.device.cpu.cpu_device import CpuDevice
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.simulated_engine import simulated_config
from hearth.runtime.runner.shared_resources import SharedResources

CONFIG = structs.replace(
    simulated_config(vocab_size=10, layers=2, capacity=64),
    backend="onnxruntime",
    hidden_size=3,
    rotary_dim=2,
)


def _write(folder: Path, table: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> None:
    save_file({"embedding": table}, folder / "embedding.safetensors")
    save_file({"cos": cos, "sin": sin}, folder / "rope.safetensors")


def _table(rows: int, columns: int, dtype: type = np.float32) -> np.ndarray:
    return np.arange(rows * columns).reshape(rows, columns).astype(dtype)


def test_everything_comes_from_configuration_and_folder(tmp_path: Path) -> None:
    _write(tmp_path, _table(10, 3, np.float16), _table(64, 1), _table(80, 1))
    resources = SharedResources.create_for_llm(CONFIG, tmp_path, CpuDevice())
    assert [len(one.kv.keys) for one in resources.cache_managers] == [2]
    assert [(one.name, one.shape) for one in resources.rope] == [
        ("rope_cos", (64, 1)),
        ("rope_sin", (80, 1)),
    ]
    assert resources.embedding.dtype == np.dtype(np.float16)
    assert resources.embedding.shape == (10, 3)
    assert resources.embedding.array[9].tolist() == [27, 28, 29]


def test_the_embedding_table_stays_in_its_file(tmp_path: Path) -> None:
    _write(tmp_path, _table(10, 3), _table(64, 1), _table(64, 1))
    table = SharedResources.create_for_llm(CONFIG, tmp_path, CpuDevice()).embedding.array
    assert not table.flags.owndata
    assert not table.flags.writeable


@pytest.mark.parametrize(
    ("table", "cos", "file"),
    [
        ((9, 3), (64, 1), "embedding.safetensors"),
        ((10, 4), (64, 1), "embedding.safetensors"),
        ((10, 3), (63, 1), "rope.safetensors"),
        ((10, 3), (64, 2), "rope.safetensors"),
    ],
)
def test_a_table_that_does_not_fit_is_refused_with_its_file(
    tmp_path: Path, table: tuple[int, int], cos: tuple[int, int], file: str
) -> None:
    _write(tmp_path, _table(*table), _table(*cos), _table(64, 1))
    with pytest.raises(HearthError) as caught:
        SharedResources.create_for_llm(CONFIG, tmp_path, CpuDevice())
    assert (caught.value.code, caught.value.field) == ("engine_corrupt", file)


def test_a_simulated_engine_embeds_each_token_as_its_number(tmp_path: Path) -> None:
    resources = SharedResources.create_for_llm(
        simulated_config(vocab_size=10), tmp_path, CpuDevice()
    )
    assert resources.embedding.array[:, 0].tolist() == list(range(10))
    assert resources.rope == ()


def test_caches_beyond_memory_are_refused(tmp_path: Path) -> None:
    config: LLMEngineRunnerConfig = structs.replace(
        simulated_config(), max_kv_cache_capacity=1 << 50
    )
    with pytest.raises(HearthError) as caught:
        SharedResources.create_for_llm(config, tmp_path, CpuDevice())
    assert (caught.value.code, caught.value.field) == ("out_of_memory", "capacity")
