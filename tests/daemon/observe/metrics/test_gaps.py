from hearth.actors.messages import Deltas, RowDelta
from hearth.daemon.observe.metrics.registry import TokenGaps


def rows(*rids: int, ending: int = -1) -> list[RowDelta]:
    return [RowDelta(rid, "x", [1], finish="length" if rid == ending else None) for rid in rids]


def prefill(ended: float, *rids: int, ending: int = -1) -> Deltas:
    return Deltas(rows(*rids, ending=ending), ended, dict.fromkeys(rids, ended - 1))


def gaps(*steps: Deltas) -> dict[float, float]:
    """How many gaps there were of up to how many seconds, where there were some."""
    counted = TokenGaps()
    for step in steps:
        counted.step(step)
    (family,) = counted.collect()
    found, before = {}, 0.0
    for sample in family.samples:
        if sample.name.endswith("_bucket") and sample.value > before:
            found[float(sample.labels["le"])] = sample.value - before
            before = sample.value
    return found


def total(*steps: Deltas) -> float:
    counted = TokenGaps()
    for step in steps:
        counted.step(step)
    (family,) = counted.collect()
    return next(sample.value for sample in family.samples if sample.name.endswith("_sum"))


def test_each_reply_of_a_step_counts() -> None:
    steps = prefill(9.0, 1, 2), Deltas(rows(1, 2), 9.15), Deltas(rows(1, 2), 9.17)
    assert gaps(*steps) == {0.02: 2, 0.2: 2}
    assert round(total(*steps), 3) == 0.34


def test_one_that_has_just_begun_waits_from_its_own_first_token() -> None:
    steps = (
        prefill(1.0, 1),
        Deltas(rows(1), 1.009),
        prefill(1.35, 2),
        Deltas(rows(1, 2), 1.4),
    )
    assert gaps(*steps) == {0.01: 1, 0.05: 1, 0.5: 1}


def test_a_pause_with_no_reply_is_no_gap() -> None:
    steps = (prefill(1.0, 1), Deltas(rows(1), 1.1), prefill(99.0, 2), Deltas(rows(2), 99.1))
    assert sum(gaps(*steps).values()) == 2
    assert round(total(*steps), 3) == 0.2


def test_one_that_was_ended_behind_its_first_token_lends_its_wait_to_nobody() -> None:
    steps = prefill(1.0, 1), prefill(99.0, 2), Deltas(rows(2), 99.1)
    assert round(total(*steps), 3) == 0.1


def test_one_that_is_cut_off_gets_no_token() -> None:
    cut = Deltas([RowDelta(1, "", [], finish="length")], 9.0)
    assert round(total(prefill(1.0, 1), Deltas(rows(1), 1.1), cut), 3) == 0.1


def test_what_never_goes_on_is_not_remembered_for_ever() -> None:
    counted = TokenGaps()
    for rid in range(3000):
        counted.step(prefill(float(rid), rid))
    assert len(vars(counted)["_begun"]) == 1024
    for rid in range(3000):
        counted.step(prefill(float(rid), rid, ending=rid))
    assert len(vars(counted)["_begun"]) == 1024


def test_one_that_ends_with_its_first_token_has_no_gap() -> None:
    steps = (
        prefill(1.0, 1),
        Deltas(rows(1), 1.1),
        prefill(1.35, 2, ending=2),
        Deltas(rows(1), 1.4),
    )
    assert round(total(*steps), 3) == 0.4
