import json
from pathlib import Path

import click
import pytest

from hearth.bench.lora import LoraSession, Switches, Turn, lora_figures, random_adapter
from hearth.runtime.config import load_config
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.lora.adapter import projection_shapes
from tests.bench.running import invoke

TURNS = [Turn(1.0, 1.01, 1.2), Turn(2.0, 2.0, 2.2), Turn(4.0, 4.2, 4.3)]
SWITCHES = Switches([0.5e-3, 0.1e-3, 9e-3], [0.03], [0.01, 0.02, 0.03], misses=6)


def test_costs_are_medians_of_what_was_measured_side_by_side() -> None:
    found = lora_figures(TURNS, SWITCHES, 16)
    assert found.step_cost == pytest.approx(1.1)
    assert found.step_cost_none == pytest.approx(1.01)
    assert found.switch_ms == pytest.approx(0.5)
    assert found.graph_misses_per_switch == 2
    assert found.first_step_cost == pytest.approx(1.5)
    assert (found.plain_ms, found.none_ms, found.adapted_ms) == (2000, 2000, 2200)
    assert (found.rank, found.switches) == (16, 3)


def test_what_misses_its_aim_is_told_and_the_shipped_model_has_its_own() -> None:
    slow = Switches([2e-3], [1.0], [1.0], misses=1)
    found = lora_figures([Turn(1.0, 1.3, 1.4)], slow, 16)
    assert [one.split()[0] for one in found.missed(shipped=False)] == [
        "switch_ms",
        "step_cost",
        "step_cost_none",
        "graph_misses_per_switch",
    ]
    assert [one.split()[0] for one in found.missed(shipped=True)] == [
        "switch_ms",
        "graph_misses_per_switch",
    ]
    assert lora_figures(TURNS[1:2], SWITCHES._replace(misses=0), 16).missed(shipped=False) == []


def run(*flags: str) -> object:
    return json.loads(invoke("lora", *flags).stdout.splitlines()[-1])


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
