"""The daemons and clients of a row of faults, and what it has measured."""

import math
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from hearth.bench.toy_daemon import simulated_flags
from hearth.daemon.own_daemon import OwnDaemon, own_daemon
from hearth.daemon.shipped import vision_engine_folder
from hearth.runtime.errors import HearthError
from tests.system.faults.injected import VARIABLE
from tests.system.faults.wire_client import WireClient

_ROOT = Path(__file__).parents[3]
STEP_MS = 10.0
PLACES = 4
_PREFILL_US = 100.0
_SETTLE_S = 0.05
"""Seconds to listen for what must not come any more."""


class NotRunError(Exception):
    """A row cannot be tried on this machine; the text says why."""


class Fixture:
    """The engine folder of a run, and the daemon that rows share which do it no harm."""

    def __init__(
        self,
        engine: Path,
        stack: ExitStack,
        *,
        simulated: bool,
        seeing: Path | None = None,
    ) -> None:
        self.engine = engine
        self.simulated = simulated
        self._seeing = seeing
        self._stack = stack
        self._shared: OwnDaemon | None = None

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags that every daemon of this run is started with."""
        return simulated_flags(STEP_MS, _PREFILL_US) if self.simulated else ()

    def shared(self) -> OwnDaemon:
        """The daemon of all rows that leave it as it was; a new one where it has ended."""
        if self._shared is None or not self._shared.runs:
            self._shared = self._stack.enter_context(own_daemon(self.engine, self.flags))
        return self._shared

    def seeing(self) -> Path:
        """An engine folder of a model that sees; raises NotRunError where there is none."""
        if self._seeing is None:
            try:
                self._seeing = vision_engine_folder()
            except HearthError as missing:
                raise NotRunError(f"{missing.message}, as --seeing") from missing
        return self._seeing


class Trial:
    """One row while it is tried.

    `measured` holds its figures, `broken` the limits that it did not keep, `lost` the requests
    without exactly one terminal answer.
    """

    def __init__(self, fixture: Fixture) -> None:
        self.measured: dict[str, Any] = {}
        self.broken: list[str] = []
        self.requests = self.lost = 0
        self.simulated = fixture.simulated
        self.engine = fixture.engine
        self._fixture = fixture

    def shared(self) -> OwnDaemon:
        """The daemon of all rows that leave it as it was."""
        return self._fixture.shared()

    @contextmanager
    def daemon(
        self, *flags: str, environ: Mapping[str, str] | None = None, log: Path | None = None
    ) -> Iterator[OwnDaemon]:
        """A daemon of this row's own, ready."""
        given = (*self._fixture.flags, *flags)
        with own_daemon(self.engine, given, environ=environ, log=log) as daemon:
            yield daemon

    @contextmanager
    def seeing(self, *flags: str) -> Iterator[OwnDaemon]:
        """A daemon of this row's own, whose real engine sees; raises NotRunError without one."""
        with own_daemon(self._fixture.seeing(), ("--log-level", "warning", *flags)) as daemon:
            yield daemon

    @contextmanager
    def breakable(self, *faults: str) -> Iterator[tuple[OwnDaemon, Path]]:
        """A daemon of this row's own with `tests.system.faults.injected` in it.

        A file in the folder asks for the fault of its name; those of `faults` are there from the
        start.
        """
        with tempfile.TemporaryDirectory(prefix="hearth-") as name:
            folder = Path(name)
            (folder / "sitecustomize.py").write_text("import tests.system.faults.injected\n")
            for fault in faults:
                (folder / fault).touch()
            path = [name, str(_ROOT), os.environ.get("PYTHONPATH", "")]
            environ = {VARIABLE: name, "PYTHONPATH": os.pathsep.join(filter(None, path))}
            # Few places, so that others wait whatever the engine takes.
            with self.daemon("--max-batch", str(PLACES), environ=environ) as daemon:
                yield daemon, folder

    @contextmanager
    def begun(self, folder: Path, *flags: str) -> Iterator[OwnDaemon]:
        """A daemon that has just been started in `folder`, gone at the end.

        Of two flags of the same name the last counts.
        """
        daemon = OwnDaemon(folder, self.engine, (*self._fixture.flags, *flags))
        try:
            yield daemon
        finally:
            daemon.kill()

    @contextmanager
    def client(self, daemon: OwnDaemon, **options: Any) -> Iterator[WireClient]:
        """A client each of whose requests has to get exactly one terminal answer."""
        with closing(WireClient(daemon.socket, **options)) as client:
            try:
                yield client
            finally:
                client.listen(_SETTLE_S)
                self.requests += len(client.asked)
                self.lost += len(client.lost())

    def at_most(self, name: str, value: float, limit: float) -> None:
        """Keep a figure that has a limit."""
        self.measured[name] = value
        if not value <= limit:
            self.broken.append(f"{name} is {value:.4g}, above {limit:g}")

    def at_least(self, name: str, value: float, limit: float) -> None:
        """Keep a figure that has a least."""
        self.measured[name] = value
        if not value >= limit:
            self.broken.append(f"{name} is {value:.4g}, below {limit:g}")

    def expect(self, name: str, value: Any, wanted: Any) -> None:
        """Keep a figure that has to be just that."""
        self.measured[name] = value
        if value != wanted:
            self.broken.append(f"{name} is {value!r} and not {wanted!r}")

    def one_of(self, name: str, value: Any, wanted: Sequence[Any]) -> None:
        """Keep a figure that has to be one of these."""
        self.measured[name] = value
        if value not in wanted:
            self.broken.append(f"{name} is {value!r} and none of {wanted!r}")

    def same_tokens(self, client: WireClient, request_id: str, reference: str) -> None:
        """Two replies have to be alike; on a real engine they may part at a near-tie."""
        # Loads the runtime, which no refusal of a wrong command line has to wait for.
        from hearth.bench.spec.contest import NEAR_TIE, divergence  # noqa: PLC0415 - said above

        parted = divergence(0, client.tokens(request_id), client.tokens(reference))
        gap = 0.0 if parted is None else parted.gap
        dtype = client.ask("status")["engine"].get("dtype", "float32")
        tie = 0.0 if self.simulated else NEAR_TIE.get(dtype, 0.0)
        self.measured["tokens_compared"] = len(client.tokens(reference))
        self.measured["tokens_equal"] = parted is None
        if gap > tie or math.isinf(gap):
            place = parted.place if parted else 0
            self.broken.append(f"token {place} differs from a run without the fault")


def most(client: WireClient) -> int:
    """The longest reply to a short prompt that the daemon takes: one that outlasts the others."""
    tokens: int = client.limits["total_tokens"]
    return tokens - 64


def seconds_since(start: float) -> float:
    """Seconds of the monotonic clock since `start`."""
    return time.monotonic() - start
