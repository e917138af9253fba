"""A process that compiles nothing: a grammar's text says what it does with it."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from hearth.actors.tokenizer.grammar_checker import FAULTS, MEMORY, GrammarJob
from hearth.actors.worker_process import JobResult, WorkerSettings, serve, settle

PROGRAM = (str(Path(__file__).resolve()),)


def work(job: GrammarJob) -> JobResult:
    match job.grammar.text:
        case "dies":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "hangs":
            time.sleep(3600)
        case "grabs":
            np.ones(2 * MEMORY, np.uint8)
        case "fails":
            raise KeyError
    # A result without a code passes; this tells who gave it.
    return JobResult(job.number, message=str(os.getpid()))


if __name__ == "__main__":
    serve(settle(sys.argv[1], WorkerSettings), GrammarJob, JobResult, work, FAULTS)
