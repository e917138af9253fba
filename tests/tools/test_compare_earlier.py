import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hearth.bench.report import Recorded
from tools.compare_earlier import compared, main

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
