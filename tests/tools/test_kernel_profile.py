"""Figures out of ncu's profiles, and beside earlier measurements, without a GPU."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hearth.bench.report import Recorded
from tools.compare_earlier import compared, main
from tools.gpu.kernel_profile import METRICS, TIMES, command, figures_of, profile, steps_of, summary

NAMES = ["ID", "Kernel Name", "Grid Size", *METRICS.values()]
UNITS = ["", "", "", "ns", "register/thread", "byte/block", *["%"] * (len(METRICS) - 3)]


def row(number: int, name: str, blocks: str, nanoseconds: str) -> list[str]:
    return [str(number), name, blocks, nanoseconds, "64", "1024", *["12.5"] * (len(METRICS) - 3)]


TABLE = [
    NAMES,
    UNITS,
    row(0, "begin", "(1, 1, 1)", "2,500"),
    row(1, "product", "(128, 1, 1)", "6000"),
    row(2, "product", "(128, 1, 1)", "8000"),
    row(3, "begin", "(8, 1, 1)", "n/a"),
]
OUTPUT = "\n".join(
    [
        "==PROF== Connected to process 7 (/usr/bin/python3)",
        "step 1 1 100 256",
        *(f'==PROF== Profiling "x" - {number}: 0%....100% - 2 passes' for number in range(3)),
        "step 8 1 100 256",
        '==PROF== Profiling "begin" - 3: 0%....100% - 2 passes',
        *(",".join(f'"{cell}"' for cell in line) for line in TABLE),
    ]
)


def test_kernels_are_told_apart_by_the_step_that_was_printed_before_them() -> None:
    steps = steps_of(OUTPUT)
    assert {sizes: len(each) for sizes, each in steps.items()} == {
        "1 1 100 256": 3,
        "8 1 100 256": 1,
    }
    assert steps["1 1 100 256"][0]["us"] == 2.5
    assert steps["8 1 100 256"][0]["us"] is None


def test_kernels_of_one_name_and_size_are_one_row() -> None:
    found = summary(steps_of(OUTPUT)["1 1 100 256"])
    assert (found["kernels"], found["kernels_us"]) == (3, 16.5)
    products = found["by_name"]["product (128x1x1) r64"]
    assert (products["count"], products["us"], products["shared_kb"]) == (2, 7.0, 1.024)


@pytest.mark.parametrize("output", ["", "step 1 1 100 256\n==ERROR== nothing was profiled"])
def test_a_run_without_kernels_gives_nothing(output: str) -> None:
    assert figures_of(TIMES, "0.6b", output) == {}


def test_figures_are_named_by_model_and_step() -> None:
    assert list(figures_of(TIMES, "0.6b", OUTPUT)) == [
        "step/0.6b/1 1 100 256",
        "step/0.6b/8 1 100 256",
    ]


def test_ncu_runs_the_steps_that_it_is_asked_for() -> None:
    line = command("ncu", TIMES, "0.6b", Path("report"))
    assert line[-4:] == ["-m", TIMES, "--profile", "0.6b"]
    assert METRICS["us"] in line[line.index("--metrics") + 1]


def test_steps_are_told_apart_where_ncu_prints_its_table_from_a_report(tmp_path: Path) -> None:
    told, table = OUTPUT.split('"ID"')
    ncu = tmp_path / "ncu"
    ncu.write_text(
        f"""#!{sys.executable}
import sys
report = sys.argv[sys.argv.index("--export" if "--export" in sys.argv else "--import") + 1]
if "--export" in sys.argv:
    print({told!r})
    open(report, "w").write({chr(34) + "ID" + chr(34) + table!r})
else:
    print(open(report).read())
"""
    )
    ncu.chmod(0o755)
    steps = steps_of(profile(str(ncu), TIMES, "0.6b"))
    assert [len(each) for each in steps.values()] == [3, 1]


def test_a_run_that_leaves_no_report_tells_what_it_printed() -> None:
    assert "nothing here" in profile("echo", "nothing here", "0.6b")


PEERS = {"step_ms": 3.0, "transformers_ms": 20.0, "torch_compile_ms": 5.0}
EARLIER = Recorded("2026-11-21", "abc", "", {"ort-cuda/4b/b8": PEERS})
NOTE = "of another run (h200.json, 2026-11-21, commit abc): transformers, ort_cuda"


def figures(**changes: Any) -> dict[str, Any]:
    peers = {f"vs_{name}": None for name in ("transformers", "torch_compile", "ort_cuda")}
    return {"step_ms": 1.0, "dtype": "float16", "notes": ["one"], **peers, **changes}


def test_an_earlier_run_stands_in_for_who_did_not_run_and_is_named() -> None:
    given = {"kernels/4b/b8": figures(torch_compile_ms=1.0, vs_torch_compile=1.0)}
    found = compared(given, EARLIER, "h200.json")
    one = found["kernels/4b/b8"]
    assert (one["ort_cuda_ms"], one["transformers_ms"], one["torch_compile_ms"]) == (3.0, 20.0, 1.0)
    assert (one["vs_ort_cuda"], one["vs_transformers"]) == (3.0, 20.0)
    assert one["notes"] == ["one", NOTE]
    assert compared(found, EARLIER, "h200.json") == found


@pytest.mark.parametrize(
    ("key", "earlier"),
    [
        ("kernels/4b/b1", PEERS),
        ("memory/4b/b8", PEERS),
        ("kernels/4b/b8", {**PEERS, "dtype": "bfloat16"}),
        ("ort-cuda/4b/b8", {"step_ms": 3.0}),
    ],
)
def test_what_has_no_counterpart_stays(key: str, earlier: dict[str, Any]) -> None:
    old = Recorded("", "abc", "", {"ort-cuda/4b/b8": earlier})
    assert compared({key: figures()}, old, "h200.json") == {key: figures()}


def test_the_record_keeps_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, earlier = tmp_path / "step.json", tmp_path / "h200.json"
    run = {"date": "2026-11-23", "commit": "new", "command": "decode"}
    record.write_text(json.dumps({**run, "figures": {"kernels/4b/b8": figures()}}))
    run = {"date": "2026-11-21", "commit": "abc", "command": "decode"}
    earlier.write_text(json.dumps({**run, "figures": {"ort-cuda/4b/b8": {"step_ms": 3.0}}}))
    monkeypatch.setattr(sys, "argv", ["compare_earlier", str(record), str(earlier)])
    assert main() == 0
    found = json.loads(record.read_text())
    assert (found["commit"], found["figures"]["kernels/4b/b8"]["vs_ort_cuda"]) == ("new", 3.0)
    monkeypatch.setattr(sys, "argv", ["compare_earlier", str(record), str(tmp_path / "none")])
    with pytest.raises(SystemExit):
        main()
