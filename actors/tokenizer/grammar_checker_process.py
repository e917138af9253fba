"""The process that compiles clients' grammars for a tokenizer, before they are accepted.

`python -m hearth.actors.tokenizer.grammar_checker_process SETTINGS`
"""

from __future__ import annotations

import sys

from hearth.actors.tokenizer.grammar_checker import FAULTS, GrammarJob
from hearth.actors.worker_process import JobResult, WorkerSettings, serve, settle
from hearth.runtime.grammar import try_grammar


def _check(job: GrammarJob) -> JobResult:
    try_grammar(job.grammar)
    return JobResult(job.number)


if __name__ == "__main__":
    serve(settle(sys.argv[1], WorkerSettings), GrammarJob, JobResult, _check, FAULTS)
