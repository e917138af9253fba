import json
import shutil
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from msgspec import structs

from hearth.bench.spec.command import SpecSession, _key, spec
from hearth.bench.spec.contest import Replies, VerifyFigures, compare
from hearth.daemon.cli.errors import FAILED
from hearth.runtime.config import load_config
from hearth.runtime.errors import HearthError
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.options import EagleDraftingConfig, RuntimeOptions

PROMPTS = [[5, 6, 7] * 6, [9, 10] * 9, [3, 4, 5, 6] * 5, [8] * 12] * 2
QUICK = ("--max-tokens", "12", "--threads", "1")
ONCE = ("--repeats", "1")


@pytest.fixture(autouse=True)
def _prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that fit the toy."""
    monkeypatch.setattr(SpecSession, "open", classmethod(lambda cls, choice: cls(choice, PROMPTS)))


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(spec, [*QUICK, *arguments], standalone_mode=False)
    if result.exception:
        raise result.exception
    return result


def figures(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def test_an_engine_without_a_draft_has_the_cases_of_lookup(tiny_engine: Path) -> None:
    result = run("--engine", str(tiny_engine), "--json", *ONCE)
    found = figures(result)
    # The toy takes four rows: the cases of eight are left out.
    assert list(found) == ["lookup/b1"]
    assert "no draft" in result.stderr
    names = {"accept_length", "speedup", "vanilla_tokens_per_s", "verify_ms", "round_share"}
    assert names <= set(found["lookup/b1"])
    assert found["lookup/b1"]["equal_replies"] == 1.0


def test_the_table_has_a_row_for_each_case(tiny_engine: Path) -> None:
    text = run("--engine", str(tiny_engine), "--case", "lookup/b1", *ONCE).stdout
    assert "accept_length" in text
    assert "lookup/b1" in text


def test_verified_replies_are_counted(toy: Path) -> None:
    result = run("--engine", str(toy), "--verify", "--json")
    assert result.return_value == 0
    found = figures(result)
    assert list(found) == ["verify/lookup/b1", "verify/lookup/b3", "verify/lookup/b8"]
    assert {one["prompts"] for one in found.values()} == {8}
    assert all(one["failures"] == [] for one in found.values())


def test_replies_are_verified_against_the_plain_folder(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = tmp_path / "plain"
    shutil.copytree(toy, plain)
    opened: list[tuple[Path, str]] = []

    def note(folder: Path, options: RuntimeOptions) -> LLMInferenceRuntime:
        opened.append((folder, options.speculation.method))
        return open_runtime(folder, options)

    open_runtime = LLMInferenceRuntime.open
    monkeypatch.setattr(LLMInferenceRuntime, "open", note)
    assert run("--engine", str(toy), "--plain", str(plain), "--verify").return_value == 0
    assert opened == [(plain, "off"), (toy, "lookup")]


def test_a_reply_that_differs_fails(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(ours: Replies, reference: Replies, near_tie: float) -> VerifyFigures:
        ours.rows[3].pop()
        return compare(ours, reference, near_tie)

    monkeypatch.setattr("hearth.bench.spec.command.compare", wrong)
    result = run("--engine", str(toy), "--verify")
    assert result.return_value == FAILED
    assert "lookup/b8: a reply parts" in result.stderr


def test_a_case_that_loses_too_much_fails(
    tiny_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("--engine", str(tiny_engine), "--case", "lookup/b1", *ONCE)
    for limit, code in ((1e-9, 0), (1e9, FAILED)):
        monkeypatch.setattr("hearth.bench.spec.command.LEAST_SPEEDUP", limit)
        assert run(*arguments).return_value == code


def test_the_figures_are_recorded(
    tiny_engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BENCH_COMMIT", "abc")
    record = tmp_path / "spec.json"
    run("--engine", str(tiny_engine), "--case", "lookup/b1", "--record", str(record), *ONCE)
    kept = json.loads(record.read_text())
    assert list(kept["figures"]) == ["lookup/b1"]


def test_cases_of_a_draft_can_be_called_otherwise() -> None:
    assert _key("kernels/b8", "kernels", "spec") == "spec/b8"
    assert _key("lookup/b8", "kernels", "spec") == "lookup/b8"
    assert _key("kernels/b8", "kernels", "") == "kernels/b8"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--case", "ort-cuda/b1"), "no case of this engine"),
        (("--tree", "4,3"), "is not K,T,N"),
        (("--tree", "4,3,16"), "no draft"),
        (("--verify", "--case", "lookup/b1"), "not for --verify"),
        (("--verify", *ONCE), "not for --verify"),
    ],
)
def test_what_makes_no_sense_is_refused(
    tiny_engine: Path, arguments: tuple[str, ...], words: str
) -> None:
    with pytest.raises(Exception, match=words):
        run("--engine", str(tiny_engine), *arguments)


def test_an_engine_of_another_device_is_refused(tiny_engine: Path) -> None:
    with pytest.raises(HearthError, match="is for cpu, not cuda") as caught:
        run("--engine", str(tiny_engine), "--device", "cuda")
    assert caught.value.field == "device"


def test_a_draft_that_is_asked_for_must_be_there(tiny_engine: Path) -> None:
    with pytest.raises(HearthError) as caught:
        run("--engine", str(tiny_engine), "--case", "cpu/b1")
    assert caught.value.field == "speculation"


def test_the_tree_reaches_the_runtime(tiny_engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[EagleDraftingConfig | None] = []

    def note(session: SpecSession, *_: object) -> None:
        seen.append(session._choice.shape)
        raise HearthError("internal", "enough")

    monkeypatch.setattr(SpecSession, "figures", note)
    monkeypatch.setattr(
        "hearth.bench.spec.command.load_config",
        lambda folder: structs.replace(load_config(folder), enable_eagle_spec_decode=True),
    )
    with pytest.raises(HearthError, match="enough"):
        run("--engine", str(tiny_engine), "--tree", "4,3,16")
    assert seen == [EagleDraftingConfig(drafting_top_k=4, drafting_step=3, verify_tree_size=16)]


def test_what_costs_nothing_is_looked_at_before_an_engine_is_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no_gpu() -> None:
        raise HearthError("engine_incompatible", "there is no GPU 0, only 0", "device")

    monkeypatch.setattr("hearth.bench.spec.command.engine_folder", Path)
    monkeypatch.setattr("hearth.bench.spec.command.gpu_facts", no_gpu)
    with pytest.raises(HearthError, match="there is no GPU"):
        run("--device", "cuda")
    with pytest.raises(HearthError) as caught:
        run("--plain", str(tmp_path / "nothing"))
    assert caught.value.code == "engine_missing"
    for tree, words in (
        ("4,3", "is not K,T,N"),
        ("4,3,160", "2 to 128 nodes"),
        ("0,3,16", "drafting_top_k"),
        ("4,31,16", "drafting_step"),
    ):
        with pytest.raises(click.UsageError, match=words):
            run("--tree", tree)


def test_an_engine_of_a_gpu_is_not_measured_without_one(
    tiny_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_gpu() -> None:
        raise HearthError("engine_incompatible", "there is no GPU", "device")

    monkeypatch.setattr("hearth.bench.spec.command.gpu_facts", no_gpu)
    monkeypatch.setattr(SpecSession, "open", None)
    monkeypatch.setattr(
        "hearth.bench.spec.command.load_config",
        lambda folder: structs.replace(load_config(folder), device="cuda"),
    )
    with pytest.raises(HearthError, match="there is no GPU"):
        run("--engine", str(tiny_engine))
