"""What the executor has measured, as clients are told."""

from hearth_client.protocol import ExecutorReport, SpeculationReport, StageReport

from actors.messages import ExecutorMetrics
from runtime.decoding.metrics import StageMetrics
from runtime.drafting.metrics import EagleGenerationMetrics


def executor_report(metrics: ExecutorMetrics) -> ExecutorReport:
    """The report of an executor; of speculation only where there was some."""
    speculation = metrics.speculation
    return ExecutorReport(
        prefill=_stage(metrics.prefill),
        generation=_stage(metrics.generation),
        speculation=_speculation(speculation) if speculation.rounds else None,
    )


def _stage(metrics: StageMetrics) -> StageReport:
    return StageReport(steps=metrics.steps, tokens=metrics.tokens, seconds=metrics.seconds)


def _speculation(metrics: EagleGenerationMetrics) -> SpeculationReport:
    return SpeculationReport(
        steps=metrics.steps,
        rounds=metrics.rounds,
        drafted=metrics.drafted,
        accepted=metrics.accepted,
        accept_length=metrics.accept_length,
        accepted_by_position=metrics.accepted_by_position,
        draft_s=metrics.draft_s,
        verify_s=metrics.verify_s,
        commit_s=metrics.commit_s,
    )
