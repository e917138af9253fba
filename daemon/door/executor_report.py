"""What the executor has measured, as clients are told."""

import msgspec
from hearth_client.protocol import ExecutorReport

from actors.supervisor_messages import ExecutorMetrics


def executor_report(metrics: ExecutorMetrics) -> ExecutorReport:
    """The report of an executor, each figure by its name.

    Speculation and images are told of where there were some.
    """
    report = msgspec.convert(metrics, ExecutorReport, from_attributes=True)
    if not metrics.speculation.rounds:
        report.speculation = None
    if not (metrics.images.images or metrics.images.encoded):
        report.images = None
    return report
