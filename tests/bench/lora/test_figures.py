import pytest

from bench.lora.figures import Switches, Turn, lora_figures

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
