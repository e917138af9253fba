"""Client of the process that compiles clients' grammars before they are accepted; its messages."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import anyio

from hearth.actors.worker_process import (
    Fault,
    Job,
    JobResult,
    WorkerFaults,
    WorkerProcess,
    WorkerSettings,
)
from hearth.runtime.errors import HearthError, known_code
from hearth.runtime.grammar import ClientGrammar

PROGRAM = ("-m", "hearth.actors.tokenizer.grammar_checker_process")
CHECK_S = 5.0
"""Seconds that a grammar may take to be compiled, ten times what its bounds let it take."""
MEMORY = 1 << 30
"""Bytes of address space that the process may take beside its own."""
_MOST_PASSED = 4096
_LOOK_S = 0.5
FAULTS = WorkerFaults(
    "the process that checks grammars",
    start="internal",
    died=Fault("grammar_invalid", "this grammar ended the process that checked it"),
    late=Fault("grammar_invalid", f"this grammar takes longer than {CHECK_S:g} s to compile"),
    memory=Fault("grammar_invalid", "this grammar needs more memory than compiling may take"),
    other=Fault("internal", "a grammar could not be checked: the log tells why"),
)


class GrammarJob(Job, frozen=True, array_like=True):
    """Compile a grammar, and make its first mask."""

    grammar: ClientGrammar


class GrammarChecker:
    """Checker of one grammar after the other, in a process of its own that the first one starts.

    Those that passed, 4,096 of them, are known by their digests, and pass again at once.
    """

    def __init__(self, program: Sequence[str] = PROGRAM) -> None:
        self._program = program
        self._worker: WorkerProcess[GrammarJob, JobResult] | None = None
        self._number = 0
        self._passed: OrderedDict[bytes, None] = OrderedDict()

    async def check(self, grammar: ClientGrammar) -> None:
        """Refuse a grammar that cannot be enforced, or that fails its compiler.

        Raises `grammar_invalid`, and `internal` where the process does not start.
        """
        digest = blake2b(grammar.text.encode(), digest_size=16).digest()
        if digest not in self._passed:
            result = await self._compiled(grammar)
            if result.code:
                raise HearthError(known_code(result.code), result.message, grammar.field)
        self._passed[digest] = None
        self._passed.move_to_end(digest)
        if len(self._passed) > _MOST_PASSED:
            self._passed.popitem(last=False)

    def close(self) -> None:
        """End the process, if there is one."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    async def _compiled(self, grammar: ClientGrammar) -> JobResult:
        self._number += 1
        try:
            worker = self._worker = self._worker or self._start()
            worker.give(GrammarJob(self._number, grammar))
            while not (results := worker.poll()):
                with anyio.move_on_after(_LOOK_S):
                    await anyio.wait_readable(worker.descriptor)
        except BaseException:
            # Of what was not waited for the next one is not to get the result.
            self.close()
            raise
        return results[0]

    def _start(self) -> WorkerProcess[GrammarJob, JobResult]:
        settings = WorkerSettings(memory=MEMORY)
        return WorkerProcess(self._program, settings, JobResult, lambda _: CHECK_S, FAULTS)
