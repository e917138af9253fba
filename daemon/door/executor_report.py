"""What the executor has measured, as clients are told."""

import msgspec
from hearth_client.protocol import ExecutorReport

from actors.supervisor_messages import ExecutorMetrics


def executor_report(metrics: ExecutorMetrics) -> ExecutorReport:
    """The report of an executor, each figure by its name; of speculation where there was some."""
    report = msgspec.convert(metrics, ExecutorReport, from_attributes=True)
    if not metrics.speculation.rounds:
        report.speculation = None
    return report
