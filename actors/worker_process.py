"""A process that does jobs with what clients have sent, its owner's end and its own."""

from __future__ import annotations

import os
import resource
import select
import socket
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import msgspec
from msgspec import structs

import hearth
from hearth.actors.own_process import die_first, die_with, ignore_signals
from hearth.runtime.errors import Code, HearthError

PACKET_BYTES = 400 << 10
"""Bytes of the longest message, the largest schemas of a request; each message is one packet."""
NO_JOB = -1
START_S = 60.0
"""Seconds that a process may take until it is ready."""
STARTS = 3
"""Number of processes in a row that may end before they are ready."""
_AHEAD = 2
"""Number of jobs sent ahead, so that the process need not wait for the next."""
_MOST_S = 1.0
"""Most seconds that count of the time between two polls: a suspended machine is no timeout."""
_KILL_S = 5.0
# The kernel doubles what is asked for.
_BUFFER = PACKET_BYTES // 2 + 4096
# The same code as here, and not whatever lies in the folder where the daemon was started.
_SOURCE = Path(hearth.__file__).resolve().parents[1]


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The one argument of a process: its end of the channel, its owner, and its limit.

    Once ready the process may take `memory` bytes more of address space.
    """

    channel: int = -1
    parent: int = 0
    memory: int


class Job(msgspec.Struct, frozen=True, array_like=True):
    """A job; answered by one result, in order."""

    number: int


class JobResult(msgspec.Struct, frozen=True, array_like=True):
    """Result of a job, or `code` and `message`; the first, of no job, means ready."""

    number: int = NO_JOB
    code: str = ""
    message: str = ""


class Fault(NamedTuple):
    """An error as its owner tells it."""

    code: Code
    message: str


class WorkerFaults(NamedTuple):
    """Errors of one kind of process, as its owner tells them."""

    what: str
    """The process, with its article."""
    start: Code
    """Code where it does not start."""
    died: Fault
    late: Fault
    memory: Fault
    other: Fault


JobT = TypeVar("JobT", bound=Job)
ResultT = TypeVar("ResultT", bound=JobResult)
SettingsT = TypeVar("SettingsT", bound=WorkerSettings)


class WorkerProcess(Generic[JobT, ResultT]):
    """Non-blocking client of a process that does one job after the other.

    A process that dies or takes longer than `limit` says, in seconds, for a job is replaced. Its
    current job fails, unless the process had done other jobs, which may be the cause of its death:
    then the job is retried once, as the first of a new process. Waiting jobs go on there. It is to
    be made and polled by one thread that lives as long as it does: the process dies with it.
    """

    def __init__(
        self,
        program: Sequence[str],
        settings: WorkerSettings,
        result: type[ResultT],
        limit: Callable[[JobT], float],
        faults: WorkerFaults,
        *,
        descriptors: Sequence[int] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._program, self._settings, self._descriptors = program, settings, descriptors
        self._result, self._limit, self._faults = result, limit, faults
        self._clock = clock
        self._decoder = msgspec.msgpack.Decoder(result)
        self._waiting: deque[JobT] = deque()
        self._given: deque[JobT] = deque()
        # Killed ones, whose memory may take the kernel a while.
        self._ending: list[subprocess.Popen[bytes]] = []
        # Seconds that the process has spent on its start or its job, as of the last poll.
        self._spent_s = self._seen = 0.0
        self._starts = 0
        self._start()

    @property
    def descriptor(self) -> int:
        """Descriptor that is readable when there are results; another one behind a poll."""
        return self._channel.fileno()

    def give(self, job: JobT) -> None:
        """Append a job."""
        self._waiting.append(job)
        self._hand_over()

    def drop(self, numbers: Iterable[int]) -> list[int]:
        """Remove jobs that the process has not been sent; returns their numbers."""
        gone = {job.number for job in self._waiting}.intersection(numbers)
        self._waiting = deque(job for job in self._waiting if job.number not in gone)
        return sorted(gone)

    def poll(self) -> list[ResultT]:
        """Results since the last poll; to be called at least once a second while there are jobs.

        Raises the fault's `start` if `STARTS` processes in a row have not become ready.
        """
        results, alive = self._read()
        now = self._clock()
        self._spent_s += min(now - self._seen, _MOST_S)
        self._seen = now
        if results:
            self._spent_s = 0.0
        if not alive:
            results += self._bury()
        elif self._ready and not self._given:
            self._spent_s = 0.0
        elif self._spent_s > self._limit_s():
            results += self._end_stuck()
        self._hand_over()
        self._ending = [process for process in self._ending if process.poll() is None]
        return results

    def wait_ready(self) -> None:
        """Block until the process is ready; raises the fault's `start`."""
        while not self._ready:
            select.select([self._channel], [], [], _MOST_S)
            self.poll()

    def close(self) -> None:
        """End the process."""
        self._kill()
        with suppress(subprocess.TimeoutExpired):
            for process in self._ending:
                process.wait(_KILL_S)

    def _start(self) -> None:
        self._channel, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setblocking(False)
        self._channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        settings = structs.replace(self._settings, channel=end.fileno(), parent=os.getpid())
        with end:
            self._process = subprocess.Popen(  # noqa: S603 - our own program and settings
                [sys.executable, *self._program, msgspec.json.encode(settings).decode()],
                stdin=subprocess.DEVNULL,
                cwd=_SOURCE,
                pass_fds=(end.fileno(), *self._descriptors),
                # Nothing is multiplied there, and each thread would take addresses.
                env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
            )
        self._ready = False
        self._starts += 1
        self._done = 0
        self._spent_s = 0.0
        self._seen = self._clock()

    def _hand_over(self) -> None:
        while self._ready and self._waiting and len(self._given) < _AHEAD:
            try:
                self._channel.send(msgspec.msgpack.encode(self._waiting[0]))
            except OSError:
                # Full, or the process has died, which is read next.
                return
            if not self._given:
                self._spent_s = 0.0
            self._given.append(self._waiting.popleft())

    def _read(self) -> tuple[list[ResultT], bool]:
        """The results that have come, and True while the process may send more."""
        results: list[ResultT] = []
        while True:
            try:
                data = self._channel.recv(PACKET_BYTES)
            except BlockingIOError:
                return results, True
            except ConnectionResetError:
                # It died before it had read all; its results are still to come.
                continue
            if not data:
                return results, False
            result = self._decoder.decode(data)
            if result.number == NO_JOB:
                self._ready, self._starts = True, 0
                continue
            self._given.popleft()
            self._done += 1
            results.append(result)

    def _limit_s(self) -> float:
        return self._limit(self._given[0]) if self._ready else START_S

    def _end_stuck(self) -> list[ResultT]:
        if not self._ready:
            raise self._no_start("is not ready in time")
        job = self._given.popleft()
        self._replace()
        return [self._result(job.number, *self._faults.late)]

    def _bury(self) -> list[ResultT]:
        if not self._ready and self._starts >= STARTS:
            raise self._no_start("ended at once")
        blamed = [self._given.popleft()] if self._given and not self._done else []
        self._replace()
        return [self._result(job.number, *self._faults.died) for job in blamed]

    def _replace(self) -> None:
        self._kill()
        self._waiting.extendleft(reversed(self._given))
        self._given.clear()
        self._start()

    def _kill(self) -> None:
        self._channel.close()
        self._process.kill()
        self._ending.append(self._process)

    def _no_start(self, what: str) -> HearthError:
        text = f"{self._faults.what} {what}: the daemon's log tells why"
        return HearthError(self._faults.start, text)


def serve(
    settings: WorkerSettings,
    job: type[JobT],
    result: type[ResultT],
    work: Callable[[JobT], ResultT],
    faults: WorkerFaults,
) -> None:
    """Do one job after the other until the owner closes the channel; in the process."""
    _limit_memory(settings.memory)
    decoder, encode = msgspec.msgpack.Decoder(job), msgspec.msgpack.encode
    # An owner that was killed with unread results shows as an error.
    with suppress(ConnectionError), socket.socket(fileno=settings.channel) as channel:
        channel.send(encode(result()))
        while data := channel.recv(PACKET_BYTES):
            one = decoder.decode(data)
            try:
                done = work(one)
            except HearthError as error:
                done = result(one.number, error.code, error.message)
            except MemoryError:
                done = result(one.number, *faults.memory)
            except Exception:  # noqa: BLE001 - answered, and shown where the daemon's output goes
                traceback.print_exc()
                done = result(one.number, *faults.other)
            channel.send(encode(done))


def settle(argument: str, settings: type[SettingsT]) -> SettingsT:
    """Read the settings of this process, and tie its life to its owner's."""
    read = msgspec.json.decode(argument, type=settings)
    ignore_signals()
    die_with(read.parent)
    die_first()
    # A core dump of a broken library is of no use.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return read


def _limit_memory(beside: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + beside
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
