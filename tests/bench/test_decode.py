import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.cases import CASES
from bench.commands import bench
from bench.decode import PROMPT_TOKENS, DecodeOptions, make_plan
from bench.figures import SHARE_LIMIT
from tests.bench.test_worker import hide

PEERS = ("torch", "transformers", "llama_cpp", "gguf")


def test_the_plan_is_the_same_for_everyone_every_time() -> None:
    case = CASES["0.6b/int4"]
    options = DecodeOptions(threads=2, spin=True)
    plan = make_plan(case, options, "int8")
    assert plan == make_plan(case, options, "int8")
    assert len(plan.prompt) == PROMPT_TOKENS
    assert (plan.precision, plan.steps, plan.spin) == ("int8", case.steps, True)
    assert make_plan(CASES["0.6b/fp32"], options).precision == "float32"


def decode(tmp_path: Path, *flags: str) -> tuple[int, dict[str, dict[str, object]], str]:
    arguments = ["decode", "--quick", "--threads", "1", "--cache", str(tmp_path / "cache"), *flags]
    result = CliRunner().invoke(bench, [*arguments, "--json"], standalone_mode=False)
    assert result.exception is None
    return result.return_value, json.loads(result.stdout.splitlines()[-1]), result.stderr


def test_missing_peers_are_null_and_stated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for peer in PEERS:
        hide(tmp_path, peer, monkeypatch)
        monkeypatch.setitem(sys.modules, peer, None)
    code, figures, _ = decode(tmp_path, "--case", "0.6b/fp32")
    case = figures["0.6b/fp32"]
    assert code == 0
    assert case["vs_transformers"] is case["vs_llama_cpp"] is None
    assert case["notes"] == [
        "transformers is not installed: make bench-env",
        "gguf is not installed: make bench-env",
    ]
    assert isinstance(case["tokens_per_s"], float)
    assert isinstance(case["floor_share"], float)
    assert 0 < case["floor_share"] < SHARE_LIMIT


@pytest.mark.reference
def test_all_contenders_are_measured_together(tmp_path: Path) -> None:
    for peer in PEERS:
        pytest.importorskip(peer)
    code, figures, progress = decode(tmp_path, "--case", "0.6b/fp32")
    case = figures["0.6b/fp32"]
    assert code == 0
    assert isinstance(case["vs_transformers"], float)
    assert isinstance(case["vs_llama_cpp"], float)
    assert case["same_tokens"] == {"transformers": case["tokens"], "llama_cpp": case["tokens"]}
    assert "round 2 of 2" in progress
