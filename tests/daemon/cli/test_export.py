from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from daemon.cli.export import export
from runtime.config import load_config
from runtime.errors import HearthError
from tests.daemon.conftest import REFERENCE


def run(*arguments: str) -> Result:
    return CliRunner().invoke(export, arguments, standalone_mode=False, catch_exceptions=False)


def test_every_option_reaches_the_engine(tmp_path: Path) -> None:
    target = tmp_path / "engine"
    result = run(
        *(str(REFERENCE), str(target), "--dialect", "classic", "--capacity", "64"),
        *("--max-batch", "2", "--prefill-chunk", "16", "--quantization", "int8"),
    )
    config = load_config(target)
    assert (config.dialect, config.max_kv_cache_capacity) == ("classic", 64)
    assert (config.max_supported_batch_size, config.prefill_chunk) == (2, 16)
    assert (config.weight_quantization, config.weight_block_size) == ("int8", 32)
    assert "hearth serve --engine" in result.stderr


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(HearthError):
        run(str(tmp_path / "none"), str(tmp_path / "engine"))
    assert list(tmp_path.iterdir()) == []


def test_wrong_choices_are_usage_errors() -> None:
    result = CliRunner().invoke(export, ["a", "b", "--dtype", "float8"])
    assert result.exit_code == 2
