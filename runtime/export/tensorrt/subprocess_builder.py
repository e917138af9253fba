"""Runs the builder module in the Python that has the wanted TensorRT, and reads its events."""

import json
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from runtime.errors import Code, HearthError
from runtime.export.progress import Progress
from runtime.export.tensorrt import builder

_LINES = 8
"""Lines of standard error that an error quotes."""
_CODES: dict[str, Code] = {
    "no_module": "unsupported_option",
    "no_gpu": "unsupported_option",
    "unsupported": "unsupported_option",
    "out_of_memory": "out_of_memory",
    "unwritable": "invalid_value",
}


class NoAttentionKernelError(HearthError):
    """The builder has no fused attention for this type, head size and GPU."""


def run_builder(
    python: str, job: dict[str, Any], progress: Progress | None = None
) -> dict[str, Any]:
    """Do one job in a process of its own, and return its last event.

    Raises `unsupported_option` when the builder cannot run here, `out_of_memory`, `invalid_value`
    when the plan cannot be written, or `model_unsupported` with what the builder said;
    `NoAttentionKernelError` is one of these.
    """
    last: dict[str, Any] = {}
    errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed below, also when the start fails
    with errors, _job_file(job) as path, _process(python, path, errors) as process:
        for line in process.stdout or ():
            event = _event(line)
            if event["event"] == "progress" and progress is not None:
                progress(f"plan: {event['stage']}"[:40], event["done"], max(event["total"], 1))
            if event["event"] in ("built", "failed"):
                last = event
        if last.get("event") != "built":
            raise _failure(last, process.wait(), errors)
    return last


@contextmanager
def _job_file(job: dict[str, Any]) -> Iterator[str]:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(job, file)
        file.flush()
        yield file.name


@contextmanager
def _process(python: str, job: str, errors: Any) -> Iterator["subprocess.Popen[bytes]"]:
    command = [python, str(Path(builder.__file__)), job]
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)  # noqa: S603 - our program
    except OSError as error:
        raise HearthError(
            "unsupported_option", f"{python} cannot be started: {error}", "builder_python"
        ) from error
    with process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise


def _event(line: bytes) -> dict[str, Any]:
    # The library prints lines of its own; only ours are JSON objects with an event.
    try:
        event = json.loads(line)
    except ValueError:
        return {"event": "noise"}
    return event if isinstance(event, dict) and "event" in event else {"event": "noise"}


def _failure(last: dict[str, Any], status: int, errors: IO[bytes]) -> HearthError:
    kind = last.get("kind", "died")
    message = last.get("message") or f"the builder {_how(status)}: {_tail(errors)}"
    if kind == "no_attention_kernel":
        return NoAttentionKernelError("model_unsupported", message, "dialect")
    field = "target" if kind == "unwritable" else "backend"
    return HearthError(_CODES.get(kind, "model_unsupported"), message, field)


def _how(status: int) -> str:
    if status >= 0:
        return f"ended without a word, exit code {status}"
    return f"was ended by signal {-status} ({signal.strsignal(-status)})"


def _tail(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").splitlines()
    return "; ".join([line.strip() for line in lines if line.strip()][-_LINES:])
