from hearth.runtime.generation.step_times import StageMetrics


def test_steps_add_up() -> None:
    metrics = StageMetrics()
    metrics.record(8, 0.5)
    metrics.record(2, 1.5)
    assert (metrics.steps, metrics.tokens, metrics.seconds) == (2, 10, 2.0)
