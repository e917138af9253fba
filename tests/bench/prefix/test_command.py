import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from hearth.bench import one_row
from hearth.bench.__main__ import bench
from hearth.bench.prefix import command
from hearth.bench.prefix.command import room, runtime_options
from hearth.runtime.errors import HearthError
from hearth.runtime.memory.sizes import kv_cache_bytes
from hearth.runtime.onnx_runtime import installed_version, reads_native
from tests.runtime.engine_configs import small_config


def run(*flags: str) -> tuple[int, dict[str, Any], str]:
    result = CliRunner().invoke(bench, ["prefix", *flags], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.return_value, json.loads(result.stdout.splitlines()[-1]), result.stderr


def test_a_toy_is_measured_and_its_replies_are_those_without_the_cache(tmp_path: Path) -> None:
    flags = ("--quick", "--rounds", "1", "--threads", "1", "--cache", str(tmp_path), "--json")
    _, found, said = run(*flags, "--shared", "64", "--shared", "1024", "--shared", "8192")
    assert "what is longer is left out" in said
    assert list(found["shared"]) == ["64", "1024"]
    native = reads_native(installed_version())
    assert (found["equal"], found["exact"]) == (1.0, native)
    assert found["saved_share"] <= found["shared"]["1024"]["saved_share"]
    assert found["ttft_ratio_1024"] < 1
    assert found["shared"]["1024"]["reused"] == 1024
    # Keys and values of 2 layers, in float32: 2 heads of 32.
    assert found["bytes_per_token"] == 2 * 2 * 2 * 32 * 4


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--engine", "x", "--quick"), "for the model that this bench makes"),
        (("--engine", "x", "--kind", "int4"), "for the model that this bench makes"),
        (("--kind", "tensorrt"), "no kind on cpu"),
        (("--builder-python", "x"), "is for --kind tensorrt"),
    ],
)
def test_what_cannot_be_measured_is_wrong_usage(flags: tuple[str, ...], words: str) -> None:
    with pytest.raises(click.UsageError) as caught:
        run(*flags)
    assert words in caught.value.format_message()


def test_an_engine_of_another_device_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_row, "gpu_facts", lambda: None)
    monkeypatch.setattr(command, "load_config", lambda _folder: small_config())
    with pytest.raises(HearthError, match="for cpu, not cuda") as caught:
        run("--device", "cuda", "--engine", str(tmp_path))
    assert caught.value.field == "device"


def test_the_cache_holds_the_longest_prompt_twice() -> None:
    config = small_config()
    options = runtime_options(config, 64)
    assert options.prefix_cache_bytes == 2 * kv_cache_bytes(config, 1, room(64))
    assert (options.max_batch, options.capacity) == (1, config.max_kv_cache_capacity)
