import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from bench.commands import bench
from bench.lora.session import LoraSession, random_adapter
from runtime.adapters.adapter import projection_shapes
from runtime.config import load_config
from runtime.decoding.runtime import LLMInferenceRuntime


def run(*flags: str) -> object:
    result = CliRunner().invoke(bench, ["lora", *flags], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return json.loads(result.stdout.splitlines()[-1])


def test_a_toy_is_measured_and_every_step_behind_a_switch_has_its_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[LLMInferenceRuntime] = []
    real = LoraSession.__init__

    def spied(
        self: LoraSession, plain: LLMInferenceRuntime, adapted: LLMInferenceRuntime, rank: int
    ) -> None:
        seen.extend((plain, adapted))
        real(self, plain, adapted, rank)

    monkeypatch.setattr(LoraSession, "__init__", spied)
    sizes = ("--rounds", "2", "--tokens", "3", "--switches", "4", "--rank", "4")
    found = run("--quick", "--threads", "1", "--cache", str(tmp_path), *sizes, "--json")
    assert isinstance(found, dict)
    assert (found["rank"], found["switches"], found["graph_misses_per_switch"]) == (4, 4, 0)
    assert min(found["plain_ms"], found["none_ms"], found["adapted_ms"]) > 0
    assert [one.config.max_supported_lora_rank for one in seen] == [0, 4]
    engine = next(tmp_path.glob("quick-lora-fp32-4-*"))
    config = load_config(engine)
    first, second = (random_adapter(config, 4, seed) for seed in (0, 1))
    assert first.parts.keys() == projection_shapes(config).keys()
    assert (first.rank, first.digest == second.digest) == (4, False)
    for place, (inputs, outputs) in projection_shapes(config).items():
        part = first.parts[place]
        assert (part.a.shape, part.b.shape) == ((inputs, 4), (4, outputs))
        assert part.a.any()
        assert part.b.any()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--kind", "tensorrt"), "no kind on cpu"),
        (("--builder-python", "x"), "is for --kind tensorrt"),
        (("--quick", "--model", "tiny"), "a model of its own"),
    ],
)
def test_what_cannot_be_measured_is_wrong_usage(flags: tuple[str, ...], words: str) -> None:
    with pytest.raises(click.UsageError) as caught:
        run(*flags)
    assert words in caught.value.format_message()
