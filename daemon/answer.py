"""What `hearth check --answer` finds out by loading the engine."""

from contextlib import closing
from pathlib import Path

from msgspec import structs

from daemon.check import Report
from daemon.configuration.settings import Settings
from daemon.wiring import runtime_options
from runtime.decoding.runtime import LLMInferenceRuntime
from runtime.errors import HearthError
from runtime.known_answer import load_answer


def with_answer(report: Report, settings: Settings, folder: Path) -> Report:
    """The report of an engine that can be served, once its known answer has been compared."""
    if not report.ok:
        return report
    try:
        with closing(LLMInferenceRuntime.open(folder, runtime_options(settings))) as runtime:
            answer = load_answer(folder, runtime.config)
            if answer is None:
                return structs.replace(report, answer="none")
            runtime.capture([1, runtime.max_batch])
            given = runtime.check_answer(answer)
    except HearthError as error:
        answer_is = "wrong" if error.code == "wrong_answer" else report.answer
        return structs.replace(
            report, ok=False, reason=error.message, code=error.code, field=error.field,
            answer=answer_is,
        )  # fmt: skip
    return structs.replace(report, answer="right", answer_report=given)
