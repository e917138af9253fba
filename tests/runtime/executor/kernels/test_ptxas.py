import json

import pytest

from tests.runtime.executor.kernels import ptxas
from tests.runtime.executor.kernels.ptxas import SHAPES, TARGETS, Use, differences, used

LOG = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'narrow' for 'sm_90a'
ptxas info    : Function properties for narrow
    72 bytes stack frame, 72 bytes spill stores, 36 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 72 bytes cumulative stack size
ptxas info    : Compile time = 12.000 ms
ptxas info    : Compiling entry function 'wide' for 'sm_90a'
ptxas info    : Function properties for wide
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 90 registers, used 1 barriers
"""


def test_what_each_kernel_takes_is_read_from_the_log() -> None:
    assert used(LOG) == {"narrow": Use(128, 72, 36), "wide": Use(90, 0, 0)}
    assert used("nothing of ptxas") == {}


def test_what_differs_is_said() -> None:
    recorded = {"a": [90, 0, 0], "b": [128, 72, 36], "c": [40, 0, 0]}
    assert differences(recorded, recorded) == []
    found = differences(recorded, {"a": [90, 0, 0], "b": [128, 0, 0], "d": [50, 4, 4]})
    assert found == [
        "b: 128 registers, spills nothing, recorded 128 registers, spills 72 and reads 36 bytes",
        "c: is no more",
        "d: is new, 50 registers, spills 4 and reads 4 bytes",
    ]


def test_the_record_is_of_the_kernels_that_are_planned_now() -> None:
    recorded = json.loads(ptxas.RECORD.read_text("utf-8"))["kernels"]
    planned = {
        f"{target}/{shape}/{kind}/{name}"
        for target in TARGETS
        for shape in SHAPES
        for kind in ("float16", "int4")
        for name in ptxas.hot_kernels(ptxas.facts_of(target), shape, kind)
    }
    assert set(recorded) == planned


def test_a_measured_shape_spills_nothing_that_was_not_seen() -> None:
    """Those of the performance page: one token in 16 bits."""
    recorded = json.loads(ptxas.RECORD.read_text("utf-8"))["kernels"]
    for name, (_, stored, loaded) in recorded.items():
        _, shape, kind, _ = name.split("/")
        if kind == "float16" and shape in {"0.6b", "4b"}:
            assert (stored, loaded) == (0, 0), name


@pytest.mark.parametrize(("given", "code"), [({}, 0), ({"a": [9, 4, 4]}, 1)])
def test_the_exit_code_tells_of_a_difference(
    given: dict[str, list[int]],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recorded = json.loads(ptxas.RECORD.read_text("utf-8"))["kernels"]
    monkeypatch.setattr(ptxas, "measured", lambda _targets: recorded | given)
    monkeypatch.setattr("sys.argv", ["ptxas"])
    assert ptxas.main() == code
    told = capsys.readouterr().out
    assert f"{len(recorded | given)} kernels, {code} differences" in told
    assert ("a: is new" in told) == bool(code)
