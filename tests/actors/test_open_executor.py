from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec import structs
from structlog.testing import capture_logs

from actors.addresses import AddressBook, Placement
from actors.open_executor import _facts, open_runtime
from actors.roles import ExecutorRole
from runtime.decoding.runtime import LLMInferenceRuntime
from runtime.device.cpu.cpu_device import CpuDevice
from runtime.device.stream import Stream
from runtime.engine_folder import write_config
from runtime.errors import HearthError
from runtime.executor.engine import Binding
from runtime.executor.simulated_engine import SimulatedEngine, simulated_config
from runtime.memory.predicted import predict_memory
from runtime.options import RuntimeOptions


@pytest.fixture
def role(tmp_path: Path) -> ExecutorRole:
    write_config(tmp_path, simulated_config(capacity=64, max_batch=4))
    book = AddressBook(folder=str(tmp_path), placement=Placement())
    return ExecutorRole(
        addresses=book.seen_from("executor"),
        inboxes=book.executor(1),
        engine=str(tmp_path),
        options=RuntimeOptions(max_batch=3),
    )


def test_every_batch_size_is_captured_and_a_step_has_worked(role: ExecutorRole) -> None:
    with capture_logs() as logs:
        runtime = open_runtime(role)
    assert (runtime.counters.captures, runtime.generation_metrics.tokens) == (3, 1)
    assert logs == []


def test_what_was_chosen_for_memory_is_among_the_facts(
    role: ExecutorRole, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "chosen" not in _facts(open_runtime(role))
    whole = structs.replace(role, options=RuntimeOptions())
    fits = open_runtime(structs.replace(role, options=RuntimeOptions(max_batch=1, capacity=64)))
    used = sum(predict_memory(fits.config, max_batch=1, capacity=64).values())
    monkeypatch.setattr("runtime.decoding.runtime.available_memory", lambda: used * 8 // 7 + 8)
    runtime = open_runtime(whole)
    facts = _facts(runtime)
    assert (facts["max_batch"], facts["capacity"]) == (runtime.max_batch, 64) == (1, 64)
    assert str(facts["chosen"]).startswith("1 row of 64 tokens: 4 rows of 64 tokens would take ")


def test_what_makes_steps_slower_is_told(
    role: ExecutorRole, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuDevice, "settle", lambda _: False)
    with capture_logs() as logs:
        open_runtime(role)
    assert [(log["log_level"], "second context" in log["reason"]) for log in logs] == [
        ("warning", True)
    ]


@pytest.mark.parametrize("failing", ["capture", "step"])
def test_what_fails_before_ready_closes_the_runtime(
    role: ExecutorRole, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def fail(*_: object) -> None:
        raise HearthError("executor_failed", "the engine failed in a step")

    def close(runtime: LLMInferenceRuntime) -> None:
        closed.append(runtime)

    closed: list[LLMInferenceRuntime] = []
    monkeypatch.setattr(LLMInferenceRuntime, failing, fail)
    monkeypatch.setattr(LLMInferenceRuntime, "close", close)
    with pytest.raises(HearthError, match="failed in a step"):
        open_runtime(role)
    assert len(closed) == 1


def test_an_engine_whose_steps_cannot_be_captured_serves_with_a_warning(
    role: ExecutorRole, monkeypatch: pytest.MonkeyPatch
) -> None:
    def capture(*_: object) -> None:
        raise HearthError("executor_failed", "the step cannot be captured: not permitted")

    def run(engine: SimulatedEngine, bindings: Sequence[Binding], stream: Stream) -> None:
        real(engine, bindings, stream).launch(stream)

    real = SimulatedEngine.capture
    monkeypatch.setattr(SimulatedEngine, "capture", capture)
    monkeypatch.setattr(SimulatedEngine, "run", run)
    with capture_logs() as logs:
        runtime = open_runtime(role)
    assert (runtime.counters.failed_captures, runtime.generation_metrics.tokens) == (3, 1)
    reasons = [log["reason"] for log in logs]
    assert reasons == ["3 steps are not captured: the step cannot be captured: not permitted"]
