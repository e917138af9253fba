import json
import shutil
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import Result
from msgspec import structs

from hearth.bench.batches import BatchRun, TimedStep, run_batch
from hearth.bench.spec import command, contest
from hearth.bench.spec.command import (
    ALL_CASES,
    VERIFY_SHAPES,
    Prompt,
    SpecSession,
    Turn,
    _key,
    encode_prompts,
    held_out_prompts,
    prefix_of,
    shape_name,
    spec,
    spec_cases,
    spread,
    verified_shapes,
)
from hearth.bench.spec.contest import (
    Divergence,
    MixedFigures,
    Repeat,
    Replies,
    VerifyFigures,
    batches,
    compare,
    divergence,
    measure_contest,
    measure_mixed,
    metrics_since,
    replies,
    spec_figures,
)
from hearth.daemon.cli.errors import FAILED
from hearth.runtime.config import load_config
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.simulated_engine import simulated_config
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.options import EagleDraftingConfig, RuntimeOptions
from hearth.runtime.request import RowRequest, RowRound, RowToken, TopLogprob
from hearth.runtime.speculation.policy import EagleGenerationMetrics
from hearth.runtime.text.tokenizer import Tokenizer
from tests.bench.running import invoke
from tests.runtime.text.folders import byte_level, open_tokenizer

PROMPTS = [[5, 6, 7] * 6, [9, 10] * 9, [3, 4, 5, 6] * 5, [8] * 12] * 2
QUICK = ("--max-tokens", "12", "--threads", "1")
ONCE = ("--repeats", "1")


@pytest.fixture
def _prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that fit the toy."""
    monkeypatch.setattr(SpecSession, "open", classmethod(lambda cls, choice: cls(choice, PROMPTS)))


def run(*arguments: str) -> Result:
    return invoke(*QUICK, *arguments, command=spec)


def figures(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


@pytest.mark.usefixtures("_prompts")
def test_an_engine_without_a_draft_has_the_cases_of_lookup(tiny_engine: Path) -> None:
    result = run("--engine", str(tiny_engine), "--json", *ONCE)
    found = figures(result)
    # The toy takes four rows: the cases of eight are left out.
    assert list(found) == ["lookup/b1"]
    assert "no draft" in result.stderr
    names = {"accept_length", "speedup", "vanilla_tokens_per_s", "verify_ms", "round_share"}
    assert names <= set(found["lookup/b1"])
    assert found["lookup/b1"]["equal_replies"] == 1.0


@pytest.mark.usefixtures("_prompts")
def test_the_table_has_a_row_for_each_case(tiny_engine: Path) -> None:
    text = run("--engine", str(tiny_engine), "--case", "lookup/b1", *ONCE).stdout
    assert "accept_length" in text
    assert "lookup/b1" in text


@pytest.mark.usefixtures("_prompts")
def test_verified_replies_are_counted(toy: Path) -> None:
    result = run("--engine", str(toy), "--verify", "--json")
    assert result.return_value == 0
    found = figures(result)
    assert list(found) == ["verify/lookup/b1", "verify/lookup/b3", "verify/lookup/b8"]
    assert {one["prompts"] for one in found.values()} == {8}
    assert all(one["failures"] == [] for one in found.values())


@pytest.mark.usefixtures("_prompts")
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


@pytest.mark.usefixtures("_prompts")
def test_a_reply_that_differs_fails(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(ours: Replies, reference: Replies, near_tie: float) -> VerifyFigures:
        ours.rows[3].pop()
        return compare(ours, reference, near_tie)

    monkeypatch.setattr("hearth.bench.spec.command.compare", wrong)
    result = run("--engine", str(toy), "--verify")
    assert result.return_value == FAILED
    assert "lookup/b8: a reply parts" in result.stderr


@pytest.mark.usefixtures("_prompts")
def test_a_case_that_loses_too_much_fails(
    tiny_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("--engine", str(tiny_engine), "--case", "lookup/b1", *ONCE)
    for limit, code in ((1e-9, 0), (1e9, FAILED)):
        monkeypatch.setattr("hearth.bench.spec.command.LEAST_SPEEDUP", limit)
        assert run(*arguments).return_value == code


@pytest.mark.usefixtures("_prompts")
def test_the_figures_are_recorded(
    tiny_engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BENCH_COMMIT", "abc")
    record = tmp_path / "spec.json"
    run("--engine", str(tiny_engine), "--case", "lookup/b1", "--record", str(record), *ONCE)
    kept = json.loads(record.read_text())
    assert list(kept["figures"]) == ["lookup/b1"]


@pytest.mark.usefixtures("_prompts")
def test_cases_of_a_draft_can_be_called_otherwise() -> None:
    assert _key("kernels/b8", "kernels", "spec") == "spec/b8"
    assert _key("lookup/b8", "kernels", "spec") == "lookup/b8"
    assert _key("kernels/b8", "kernels", "") == "kernels/b8"


@pytest.mark.usefixtures("_prompts")
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


@pytest.mark.usefixtures("_prompts")
def test_an_engine_of_another_device_is_refused(tiny_engine: Path) -> None:
    with pytest.raises(HearthError, match="is for cpu, not cuda") as caught:
        run("--engine", str(tiny_engine), "--device", "cuda")
    assert caught.value.field == "device"


@pytest.mark.usefixtures("_prompts")
def test_a_draft_that_is_asked_for_must_be_there(tiny_engine: Path) -> None:
    with pytest.raises(HearthError) as caught:
        run("--engine", str(tiny_engine), "--case", "cpu/b1")
    assert caught.value.field == "speculation"


@pytest.mark.usefixtures("_prompts")
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


@pytest.mark.usefixtures("_prompts")
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


@pytest.mark.usefixtures("_prompts")
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


def contest_run(tokens: list[list[int]], seconds: float, *kinds: str) -> BatchRun:
    steps = [TimedStep(kind, 0.01, 1) for kind in ("prefill", *kinds)]  # type: ignore[arg-type]  # the three
    rows = [[RowToken(0, token) for token in row] for row in tokens]
    return BatchRun(rows=rows, steps=steps, prefill_s=1.0, generation_s=seconds)


def repeat(vanilla_s: float, ours_s: float) -> Repeat:
    vanilla = contest_run(
        [[1, 2, 3, 4, 5], [6, 7]], vanilla_s, "decode", "decode", "decode", "decode"
    )
    ours = contest_run([[1, 2, 3, 4, 5], [6, 8]], ours_s, "verify", "decode")
    return Repeat([vanilla], [ours])


def test_speeds_are_of_tokens_after_the_first_and_medians_over_the_repeats() -> None:
    metrics = EagleGenerationMetrics()
    metrics.record([RowRound(0, 4, 3)], draft_s=0.002, verify_s=0.004, commit_s=0.001)
    repeats = [repeat(1.0, 0.5), repeat(1.0, 0.25), repeat(2.0, 0.5)]
    found = spec_figures(2, repeats, metrics)
    assert found.vanilla_tokens_per_s == 5.0
    assert found.tokens_per_s == 10.0
    assert found.speedup == 4.0
    assert found.speedup_with_prefill == pytest.approx(2.0 / 1.25)
    assert (found.prompts, found.equal_replies) == (2, 0.5)
    assert (found.accept_length, found.rounds, found.drafted) == (3.0, 1, 4)
    assert found.round_share == 0.5
    assert found.vanilla_step_ms == 250.0
    assert (found.draft_ms, found.verify_ms, found.commit_ms) == (2.0, 4.0, 1.0)


def test_without_rounds_there_is_no_length_and_no_stage() -> None:
    # The policy may have stopped after the pass that is not counted.
    stopped = EagleGenerationMetrics(accepted_by_position=[0, 0])
    found = spec_figures(1, [repeat(1.0, 1.0)], stopped)
    assert (found.accept_length, found.draft_ms, found.verify_ms) == (None, None, None)
    assert found.speedup == 1.0


def test_both_ways_run_the_same_prompts_in_turns(runtimes: list[LLMInferenceRuntime]) -> None:
    prompts = [[5, 6, 7] * 6, [9, 10] * 9, [3, 4, 5, 6] * 5, [8] * 12, [1, 2, 3]]
    seen: list[tuple[int, int]] = []
    found = measure_contest(
        (runtimes[0], runtimes[1]),
        prompts,
        2,
        max_tokens=24,
        repeats=2,
        progress=lambda *progress: seen.append(progress),
    )
    assert seen == [(0, 4), (0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]
    assert (found.batch, found.prompts, found.equal_replies) == (2, 4, 1.0)
    assert found.accept_length is not None
    assert found.accept_length >= 1.0
    assert found.accept_rates[0] == 1.0
    # The pass that warms up is not counted.
    assert 0 < found.rounds < runtimes[1].speculation_metrics.rounds
    assert found.speedup == pytest.approx(found.tokens_per_s / found.vanilla_tokens_per_s, rel=0.9)


def test_batches_are_full_ones() -> None:
    prompts = [[number] for number in range(7)]
    assert list(batches(prompts, 3)) == [[[0], [1], [2]], [[3], [4], [5]]]
    assert list(batches(prompts, 8)) == []


def test_counters_are_read_between_two_moments() -> None:
    metrics = EagleGenerationMetrics()
    metrics.record([RowRound(0, 4, 3)], draft_s=1.0, verify_s=2.0, commit_s=3.0)
    before = EagleGenerationMetrics(
        steps=1, rounds=1, drafted=4, accepted=3, accepted_by_position=[1, 1, 1], draft_s=1.0
    )
    before.verify_s, before.commit_s = 2.0, 3.0
    metrics.record([RowRound(0, 4, 5)], draft_s=0.25, verify_s=0.5, commit_s=0.125)
    found = metrics_since(before, metrics)
    alone = EagleGenerationMetrics()
    alone.record([RowRound(0, 4, 5)], draft_s=0.25, verify_s=0.5, commit_s=0.125)
    assert found == alone


CONTEST_PROMPTS = [[5, 6, 7] * 6, [9, 10] * 9, [3, 4, 5, 6] * 5, [8] * 12]


def measure(runtime: LLMInferenceRuntime, batch: int = 4) -> MixedFigures:
    return measure_mixed(
        runtime,
        CONTEST_PROMPTS,
        batch,
        max_tokens=24,
        repeats=2,
        progress=lambda _done, _total: None,
    )


def test_a_mixed_step_is_compared_with_the_dearer_kind(
    runtime: LLMInferenceRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[bool | None]] = []

    def fake(_runtime: LLMInferenceRuntime, rows: list[RowRequest]) -> BatchRun:
        wishes = [row.options.speculation for row in rows]
        asked.append(wishes)
        assert all(row.options.ignore_eos for row in rows)
        kind, seconds = ("verify", 0.003 * sum(map(bool, wishes))) if any(wishes) else ("decode", 1)
        steps = [TimedStep("prefill", 9.0, 4), TimedStep(kind, seconds, 4)]  # type: ignore[arg-type] # one of the three
        # A step with fewer rows does not count.
        steps.append(TimedStep(kind, 99.0, 3))  # type: ignore[arg-type] # likewise
        return BatchRun(rows=[], steps=steps, prefill_s=0.0, generation_s=0.0)

    monkeypatch.setattr(contest, "run_batch", fake)
    found = measure(runtime)
    assert asked[:3] == [[False] * 4, [True] * 4, [True, True, False, False]]
    assert (found.vanilla_step_ms, found.round_ms, found.mixed_step_ms) == (1000.0, 12.0, 6.0)
    assert found.over_dearer == pytest.approx(0.006)
    assert (found.batch, found.steps) == (4, 2)


def test_the_three_kinds_of_step_come_from_a_real_engine(runtime: LLMInferenceRuntime) -> None:
    found = measure(runtime)
    assert min(found.mixed_step_ms, found.round_ms, found.vanilla_step_ms) > 0
    dearer = max(found.round_ms, found.vanilla_step_ms)
    assert found.over_dearer == pytest.approx(found.mixed_step_ms / dearer)


def test_a_kind_that_never_comes_is_an_error(
    runtime: LLMInferenceRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_batch

    def without_rounds(runtime: LLMInferenceRuntime, rows: list[RowRequest]) -> BatchRun:
        found = run(runtime, rows)
        found.steps = [step for step in found.steps if step.kind != "verify"]
        return found

    monkeypatch.setattr(contest, "run_batch", without_rounds)
    with pytest.raises(HearthError, match="never came"):
        measure(runtime)


@pytest.mark.parametrize("prefix", ["cpu", "kernels", "ort-cuda", "tensorrt"])
def test_each_engine_has_the_draft_s_batches_lookup_and_a_mixed_batch(prefix: str) -> None:
    cases = spec_cases(prefix)
    assert list(cases) == [
        *(f"{prefix}/b{batch}" for batch in (1, 2, 4, 8)),
        "lookup/b1",
        "lookup/b8",
        "mixed/b8",
    ]
    assert set(cases) <= set(ALL_CASES)
    assert {case.kind for case in cases.values()} == {"eagle", "lookup", "mixed"}
    assert all(name.endswith(f"/b{case.batch}") for name, case in cases.items())


def test_cases_are_named_after_what_runs_the_engine() -> None:
    cpu = simulated_config()
    cuda = structs.replace(cpu, device="cuda", backend="onnxruntime")
    assert [prefix_of(one) for one in (cpu, cuda)] == ["cpu", "ort-cuda"]
    for backend in ("kernels", "tensorrt"):
        assert prefix_of(structs.replace(cuda, backend=backend)) == backend


def test_an_engine_of_chains_is_verified_with_chains() -> None:
    config = structs.replace(simulated_config(), enable_eagle_spec_decode=True)
    assert verified_shapes(config) == VERIFY_SHAPES
    chains = verified_shapes(structs.replace(config, chains_only=True))
    assert [shape_name(one) for one in chains] == ["1-4-5"]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return open_tokenizer(tmp_path, byte_level())


def prompt(group: str) -> Prompt:
    return Prompt(group, [Turn("user", group)])


def test_prompts_are_conversations_that_end_with_a_question() -> None:
    found = held_out_prompts(24)
    assert len(found) == 24
    assert len({one.group for one in found}) > 5
    for one in found:
        assert one.messages[-1].role == "user"


def test_prompts_are_taken_at_even_distances() -> None:
    groups = [prompt(str(number)) for number in range(10)]
    assert [one.group for one in spread(groups, 4)] == ["0", "2", "5", "7"]
    assert spread(groups, 99) == groups


def test_prompts_get_the_chat_template(tokenizer: Tokenizer) -> None:
    (found,) = encode_prompts([prompt("hi")], tokenizer)
    assert found == tokenizer.encode_pairs([("user", "hi")])


def test_without_the_program_the_place_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(command, "SOURCE", tmp_path / "models" / "home")
    with pytest.raises(HearthError, match="no prompts at"):
        held_out_prompts(1)


VERIFY_PROMPTS = [[5, 6, 7] * 6, [9, 10] * 9, [3, 4, 5, 6] * 5]


def reference(*tokens: int, gap: float = 0.5) -> list[RowToken]:
    """Each token leads the one after it by `gap`; 99 is far below."""
    return [
        RowToken(0, token, -0.5, (TopLogprob(token, -0.5), TopLogprob(token + 1, -0.5 - gap)))
        for token in tokens
    ]


def plain(*tokens: int) -> list[RowToken]:
    return [RowToken(0, token) for token in tokens]


def test_equal_replies_do_not_part() -> None:
    assert divergence(0, plain(1, 2, 3), reference(1, 2, 3)) is None


def test_a_divergence_has_its_place_and_by_how_much_the_reference_led() -> None:
    found = divergence(4, plain(1, 3, 9), reference(1, 2, 3))
    assert found == Divergence(4, 1, 0.5)


@pytest.mark.parametrize(
    ("ours", "place"),
    [(plain(1, 2), 2), (plain(1, 2, 3, 4), 3), (plain(1, 99, 3), 1)],
    ids=["too short", "too long", "not among the likely"],
)
def test_what_no_near_tie_explains_has_an_infinite_gap(ours: list[RowToken], place: int) -> None:
    assert divergence(0, ours, reference(1, 2, 3)) == Divergence(0, place, float("inf"))


def test_near_ties_are_told_apart_from_failures() -> None:
    ours = Replies([plain(1, 2), plain(1, 3), plain(2, 2)], 2.5, 7)
    wanted = Replies([reference(1, 2), reference(1, 2, gap=1e-6), reference(1, 2)])
    found = compare(ours, wanted, 1e-4)
    assert (found.prompts, found.equal, found.accept_length, found.rounds) == (3, 1, 2.5, 7)
    assert [one.prompt for one in found.near_ties] == [1]
    assert [one.prompt for one in found.failures] == [2]
    assert not found.ok
    assert compare(ours, wanted, 1.0).ok


def ask(runtime: LLMInferenceRuntime, *, logprobs: bool) -> Replies:
    ticks: list[None] = []
    found = replies(
        runtime,
        VERIFY_PROMPTS,
        2,
        max_tokens=30,
        logprobs=logprobs,
        tick=lambda: ticks.append(None),
    )
    assert len(ticks) == 2
    return found


def test_replies_come_in_the_order_of_the_prompts(runtimes: list[LLMInferenceRuntime]) -> None:
    vanilla, ours = ask(runtimes[0], logprobs=True), ask(runtimes[1], logprobs=False)
    assert (vanilla.accept_length, vanilla.rounds) == (None, 0)
    assert ours.rounds > 0
    assert ours.accept_length is not None
    assert ours.accept_length >= 1
    found = compare(ours, vanilla, 1e-4)
    assert found.ok
    assert found.equal == 3


def test_a_token_that_was_not_picked_is_found(runtimes: list[LLMInferenceRuntime]) -> None:
    vanilla, ours = ask(runtimes[0], logprobs=True), ask(runtimes[1], logprobs=False)
    wrong = ours.rows[1][5]
    ours.rows[1][5] = RowToken(1, (wrong.token_id + 1) % 100)
    (failure,) = compare(ours, vanilla, 1e-4).failures
    assert (failure.prompt, failure.place) == (1, 5)
