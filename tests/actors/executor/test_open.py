import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec import structs
from structlog.testing import capture_logs

from hearth.actors.executor.open import _facts, _LoadingReport, open_runtime
from hearth.actors.mailbox import MailboxFull
from hearth.actors.roles import ExecutorSettings, Host
from hearth.actors.supervisor_messages import ActorLoading
from hearth.runtime.config import load_config
from hearth.runtime.device.device import Stream
from hearth.runtime.engine_folder import ANSWER_FILE, record_files, write_config
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.engine import Binding
from hearth.runtime.executor.simulated_engine import SimulatedEngine, simulated_config
from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.options import RuntimeOptions
from tests.references import reference_folder


@pytest.fixture
def settings(tmp_path: Path) -> ExecutorSettings:
    write_config(tmp_path, simulated_config(capacity=64, max_batch=4))
    return ExecutorSettings(engine=str(tmp_path), options=RuntimeOptions(max_batch=3))


def test_every_batch_size_is_captured_and_a_step_has_worked(settings: ExecutorSettings) -> None:
    with capture_logs() as logs:
        runtime = open_runtime(settings)
    assert (runtime.counters.captures, runtime.generation_metrics.tokens) == (3, 1)
    assert [(log["event"], log["reason"]) for log in logs] == [
        ("no known answer to compare with", "the engine is simulated")
    ]


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    export_model(reference_folder("llama"), tmp_path / "engine", ExportOptions())
    return tmp_path / "engine"


def with_engine(
    settings: ExecutorSettings, folder: Path, *, verify: bool = True
) -> ExecutorSettings:
    return structs.replace(settings, engine=str(folder), options=RuntimeOptions(verify=verify))


def told(settings: ExecutorSettings) -> dict[str, object]:
    """The one line that opening the engine logs."""
    with capture_logs() as logs:
        open_runtime(settings).close()
    (line,) = logs
    return dict(line)


def test_the_known_answer_is_compared_before_an_engine_is_ready(
    settings: ExecutorSettings, engine: Path
) -> None:
    line = told(with_engine(settings, engine))
    assert line["event"] == "the known answer is right"
    assert {"compared", "steps", "error", "tolerance", "seconds"} <= line.keys()
    assert f"off by {line['error']:.2g} at most, and rounding on this device" in str(
        line["meaning"]
    )


def test_an_engine_of_an_older_hearth_is_told_of(settings: ExecutorSettings, engine: Path) -> None:
    config = load_config(engine)
    write_config(engine, structs.replace(config, engine_format=1, template_tokens={}))
    with capture_logs() as logs:
        open_runtime(with_engine(settings, engine)).close()
    (reason,) = [log["reason"] for log in logs if log["log_level"] == "warning"]
    assert reason == load_config(engine).outdated
    assert "run hearth export again on llama" in reason


def test_how_far_the_loading_has_come_is_told(settings: ExecutorSettings, engine: Path) -> None:
    heard: list[tuple[str, float | None]] = []
    open_runtime(
        with_engine(settings, engine), lambda stage, share: heard.append((stage, share))
    ).close()
    stages = list(dict.fromkeys(stage for stage, _ in heard))
    assert stages == ["verifying", "opening", "capturing", "answering"]
    for stage in ("verifying", "capturing"):
        shares = [share or 0.0 for one, share in heard if one == stage]
        assert shares == sorted(shares)
        assert shares[-1] == 1.0
    assert ("answering", None) in heard


def test_the_supervisor_hears_each_stage_and_some_shares_a_second() -> None:
    class Mailbox:
        def post(self, message: ActorLoading) -> None:
            if message.share == 0.5:
                raise MailboxFull("supervisor")
            heard.append(message)

    heard: list[ActorLoading] = []
    now = 0.0
    host = Host("executor-1", cast("Any", None), cast("Any", None), cast("Any", Mailbox()))
    tell = _LoadingReport(host, lambda: now)
    for share in (0.1, 0.2, 0.3):
        tell("verifying", share)
    tell("opening", None)
    for now in (1.0, 1.1, 1.2, 2.0):
        tell("capturing", now / 2)
    assert [(one.stage, one.share) for one in heard] == [
        ("verifying", 0.1),
        ("opening", None),
        ("capturing", 1.0),
    ]


def test_that_kernels_are_compiled_is_in_the_log_once() -> None:
    class Mailbox:
        def post(self, message: ActorLoading) -> None:
            pass

    now = 0.0
    host = Host("executor-1", cast("Any", None), cast("Any", None), cast("Any", Mailbox()))
    with capture_logs() as lines:
        tell = _LoadingReport(host, lambda: now)
        tell("opening", None)
        for now in (1.0, 2.0, 3.5):
            tell("compiling", now / 3.5)
        tell("opening", None)
    assert [(line["event"], line.get("seconds")) for line in lines] == [
        ("kernels are compiled for this GPU and kept: later starts find them", None),
        ("the kernels are compiled", 2.5),
    ]


def test_a_folder_without_an_answer_says_so_and_serves(
    settings: ExecutorSettings, engine: Path
) -> None:
    config = load_config(engine)
    files = {name: record for name, record in config.files.items() if name != ANSWER_FILE}
    write_config(engine, structs.replace(config, files=files))
    line = told(with_engine(settings, engine))
    assert (line["event"], line["reason"]) == (
        "no known answer to compare with",
        "the engine folder has none",
    )


def test_a_wrong_answer_is_refused_unless_nobody_verifies(
    settings: ExecutorSettings, engine: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    export_model(reference_folder("llama_linear"), other, ExportOptions())
    shutil.copy(other / ANSWER_FILE, engine / ANSWER_FILE)
    write_config(engine, structs.replace(load_config(engine), files=record_files(engine)))
    with pytest.raises(HearthError) as caught:
        open_runtime(with_engine(settings, engine))
    assert caught.value.code == "wrong_answer"
    line = told(with_engine(settings, engine, verify=False))
    assert (line["log_level"], line["event"], line["reason"]) == (
        "warning",
        "the known answer is not compared",
        "verify is off",
    )


def test_what_was_chosen_for_memory_is_among_the_facts(
    settings: ExecutorSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "chosen" not in _facts(open_runtime(settings))
    whole = structs.replace(settings, options=RuntimeOptions())
    fits = open_runtime(structs.replace(settings, options=RuntimeOptions(max_batch=1, capacity=64)))
    used = sum(fits.memory.values())
    monkeypatch.setattr(
        "hearth.runtime.generation.runtime.available_memory", lambda: used * 8 // 7 + 8
    )
    runtime = open_runtime(whole)
    facts = _facts(runtime)
    assert (facts["max_batch"], facts["capacity"]) == (runtime.max_batch, 64) == (1, 64)
    assert str(facts["chosen"]).startswith("1 row of 64 tokens: 4 rows of 64 tokens would take ")


def test_what_makes_steps_slower_is_told(
    settings: ExecutorSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = "a step could not be captured"
    monkeypatch.setattr(LLMInferenceRuntime, "capture", lambda *_: [why])
    with capture_logs() as logs:
        open_runtime(settings)
    assert [(log["log_level"], log["reason"] == why) for log in logs] == [
        ("warning", True),
        ("info", False),
    ]


@pytest.mark.parametrize("failing", ["capture", "step"])
def test_what_fails_before_ready_closes_the_runtime(
    settings: ExecutorSettings, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def fail(*_: object) -> None:
        raise HearthError("executor_failed", "the engine failed in a step")

    def close(runtime: LLMInferenceRuntime) -> None:
        closed.append(runtime)

    closed: list[LLMInferenceRuntime] = []
    monkeypatch.setattr(LLMInferenceRuntime, failing, fail)
    monkeypatch.setattr(LLMInferenceRuntime, "close", close)
    with pytest.raises(HearthError, match="failed in a step"):
        open_runtime(settings)
    assert len(closed) == 1


def test_an_engine_whose_steps_cannot_be_captured_serves_with_a_warning(
    settings: ExecutorSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def capture(*_: object) -> None:
        raise HearthError("executor_failed", "the step cannot be captured: not permitted")

    def run(engine: SimulatedEngine, bindings: Sequence[Binding], stream: Stream) -> None:
        real(engine, bindings, stream).launch(stream)

    real = SimulatedEngine.capture
    monkeypatch.setattr(SimulatedEngine, "capture", capture)
    monkeypatch.setattr(SimulatedEngine, "run", run)
    with capture_logs() as logs:
        runtime = open_runtime(settings)
    assert (runtime.counters.failed_captures, runtime.generation_metrics.tokens) == (3, 1)
    reasons = [log["reason"] for log in logs if log["log_level"] == "warning"]
    assert reasons == ["3 steps are not captured: the step cannot be captured: not permitted"]
