"""The adapters that are served: the folder's, as far as an executor takes them."""

import os
import re
import shutil
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp

import anyio
import anyio.to_thread
import structlog
from msgspec import structs

from hearth.actors.messages import ExecutorControl, SetAdapter
from hearth.actors.supervisor_messages import AdapterAnswer
from hearth.daemon.configuration.settings import Settings
from hearth.daemon.control.messages import (
    AdapterAdded,
    AdapterInfo,
    AdapterList,
    AdapterRemoved,
    AddAdapter,
    ControlRequest,
    ListAdapters,
    RemoveAdapter,
)
from hearth.daemon.control.server import Handler
from hearth.runtime.config import LLMEngineRunnerConfig, load_config
from hearth.runtime.errors import HearthError, known_code
from hearth.runtime.lora.adapter import other_base
from hearth.runtime.lora.stored import AdapterRecord, adapter_folders, read_record, store_adapter

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MODE = 0o700


class AdapterFolder:
    """A folder of adapters as `store_adapter` writes them, each in a folder of its name."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def make(self) -> None:
        """Make the folder, for its owner alone; raises `invalid_value` where that cannot be."""
        try:
            self.path.mkdir(_MODE, parents=True, exist_ok=True)
        except OSError as error:
            raise self._unusable("made", error) from error

    @property
    def names(self) -> list[str]:
        """The names of all that are kept; none where there is no folder."""
        return [name for name in adapter_folders(self.path) if _NAME.fullmatch(name)]

    def of(self, name: str) -> Path:
        """The folder of an adapter; raises `invalid_value` for what is no name."""
        if not _NAME.fullmatch(name):
            text = (
                f"{name[:80]!r} is no name for an adapter: it has letters, digits, '.', '_' and "
                "'-', 64 at most, and does not begin with one of the last three"
            )
            raise HearthError("invalid_value", text, "name")
        return self.path / name

    def add(self, name: str, source: str, config: LLMEngineRunnerConfig) -> AdapterRecord:
        """Check the adapter in the folder `source`, and keep it.

        Raises `invalid_value` for a name that is taken, and what `store_adapter` raises.
        """
        target = self.of(name)
        if target.exists():
            text = f"there is an adapter {name} already: remove it first, or take another name"
            raise HearthError("invalid_value", text, "name")
        if "\0" in source or not Path(source).is_absolute():
            text = "folder must be an absolute path"
            raise HearthError("invalid_value", text, "folder")
        self.make()
        return store_adapter(Path(source), config, target)

    def remove(self, name: str) -> None:
        """Forget an adapter; it is gone at once, also where its files take a moment.

        Raises `adapter_unknown`, and `invalid_value` where the folder cannot be changed.
        """
        folder = self.of(name)
        if not folder.exists():
            text = f"there is no adapter {name}: `hearth adapter list` shows them"
            raise HearthError("adapter_unknown", text, "name")
        try:
            # No name of an adapter: a list of the folder meanwhile does not have it.
            grave = Path(mkdtemp(prefix=".", dir=self.path))
            folder.rename(grave / name)
        except OSError as error:
            raise self._unusable("changed", error) from error
        shutil.rmtree(grave, ignore_errors=True)

    def record(self, name: str) -> AdapterRecord:
        """Read the record of an adapter; raises `adapter_invalid`."""
        return read_record(self.of(name))

    def _unusable(self, what: str, error: OSError) -> HearthError:
        text = f"{self.path} cannot be {what} ({error.strerror})"
        return HearthError("invalid_value", text, "adapters")


_ANSWER_S = 45.0
_log = structlog.get_logger("hearth.adapters")


@dataclass
class _PendingRequest:
    """A pending request to an executor to load or unload an adapter."""

    name: str
    answer: AdapterAnswer | None = None
    answered: anyio.Event = field(default_factory=anyio.Event)


class AdapterStore:
    """Adds and removes adapters while requests run, one at a time, and knows which are served.

    `tell` posts to the running executor, False where there is none; `gone` notifies the owner of
    waiting requests. `served` is called when `names` change.
    """

    def __init__(
        self,
        folder: AdapterFolder,
        config: LLMEngineRunnerConfig,
        *,
        tell: Callable[[ExecutorControl], bool],
        gone: Callable[[str], Awaitable[None]],
        served: Callable[[], None],
    ) -> None:
        self._folder, self._config = folder, config
        self._tell, self._gone, self._served = tell, gone, served
        self._lock = anyio.Lock()
        self._working = False
        # By name, why it is not served: "" where it is.
        self._problems: dict[str, str] = dict.fromkeys(self._kept(), "")
        # Removed while an executor started, which may have found what was there before.
        self._stale = set[str]()
        self._pending = _PendingRequest("")

    @property
    def names(self) -> list[str]:
        """The adapters that clients may ask for."""
        return [name for name, problem in sorted(self._problems.items()) if not problem]

    @property
    def handlers(self) -> dict[type[ControlRequest], Handler]:
        """Handlers of control requests about adapters."""
        return {AddAdapter: self._add, RemoveAdapter: self._remove, ListAdapters: self._list}

    def executor_ready(self, adapters: Mapping[str, str], model: str = "") -> None:
        """Note a ready executor, and why it does not serve each adapter that it found, or "".

        `model` names the model of its external weights, where the engine has none itself.
        """
        self._working = True
        if model:
            self._config = structs.replace(self._config, model_name=model)
        kept = self._kept()
        found = {name: adapters[name] for name in set(kept) & set(adapters) - self._stale}
        self._stale.clear()
        # What was added while it was starting it may have missed, and what was removed not.
        for name in sorted(set(adapters) - set(found)):
            self._tell(SetAdapter(name, None))
        for name in sorted(set(kept) - set(found)):
            self._tell(SetAdapter(name, str(self._folder.of(name))))
        self._problems = {name: found.get(name, "") for name in kept}
        for name in self.names:
            with suppress(HearthError):  # A fault of its files is reported where it is loaded.
                self._note(name, self._folder.record(name))
        self._served()

    def executor_lost(self) -> None:
        """Note the loss of the executor: the next one loads the adapters that are kept."""
        self._working = False
        self._pending.answered.set()

    def answered(self, answer: AdapterAnswer) -> None:
        """Take the executor's answer to a request."""
        if answer.adapter == self._pending.name:
            self._pending.answer = answer
            self._pending.answered.set()
        elif answer.code and answer.adapter in self._problems:
            self._problems[answer.adapter] = answer.message
            self._served()

    async def _add(self, asked: AddAdapter) -> AdapterAdded:
        async with self._lock:
            name, folder = asked.name, self._folder
            record = await anyio.to_thread.run_sync(folder.add, name, asked.folder, self._config)
            try:
                if name in self._problems:
                    # Its folder was taken away by hand, and it is served still.
                    await self._forget(name)
                await self._load(name)
            except BaseException:
                # It may have it all the same, or take it later, behind the deadline.
                self._tell(SetAdapter(name, None))
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(folder.remove, name)
                raise
            self._problems[name] = ""
            self._served()
            _log.info("adapter added", adapter=name, rank=record.rank, source=record.source)
            note = self._note(name, record)
            return AdapterAdded(name, record.rank, record.base, record.bytes, note)

    async def _remove(self, asked: RemoveAdapter) -> AdapterRemoved:
        async with self._lock:
            name = asked.name
            try:
                await anyio.to_thread.run_sync(self._folder.remove, name)
            except HearthError as error:
                # One whose folder was taken away by hand is served still.
                if error.code != "adapter_unknown" or name not in self._problems:
                    raise
            await self._forget(name)
            _log.info("adapter removed", adapter=name)
            return AdapterRemoved(name)

    async def _forget(self, name: str) -> None:
        # Nobody may ask for it from now on, then all end that wait for it, and all that run.
        self._problems.pop(name, None)
        self._served()
        if not self._working:
            self._stale.add(name)
        await self._gone(name)
        await self._ask(name, SetAdapter(name, None))

    async def _list(self, _asked: ListAdapters) -> AdapterList:
        found = await anyio.to_thread.run_sync(self._look)
        return AdapterList(str(self._folder.path), self._config.max_supported_lora_rank, found)

    async def _load(self, name: str) -> None:
        answer = await self._ask(name, SetAdapter(name, str(self._folder.of(name))))
        if answer is not None and answer.code:
            raise HearthError(known_code(answer.code), answer.message, answer.field)

    async def _ask(self, name: str, message: ExecutorControl) -> AdapterAnswer | None:
        """Send a request to the executor, and return its answer; None where no executor works."""
        asked = self._pending = _PendingRequest(name)
        if not self._working or not self._tell(message):
            return None
        with anyio.move_on_after(_ANSWER_S):
            await asked.answered.wait()
        self._pending = _PendingRequest("")
        # It may have died of it.
        return asked.answer or _no_answer(name)

    def _note(self, name: str, record: AdapterRecord) -> str:
        """A warning of an adapter of another base, logged as well; "" where there is none."""
        note = other_base(record.base, self._config)
        if note:
            _log.warning("an adapter may be another model's", adapter=name, reason=note)
        return note

    def _kept(self) -> list[str]:
        try:
            return self._folder.names
        except HearthError as error:
            _log.warning("adapters cannot be read", reason=error.message)
            return []

    def _look(self) -> list[AdapterInfo]:
        return [self._info(name) for name in self._folder.names]

    def _info(self, name: str) -> AdapterInfo:
        try:
            record = self._folder.record(name)
        except HearthError as error:
            return AdapterInfo(name, problem=error.message)
        problem = self._problems.get(name, "")
        note = "" if problem else other_base(record.base, self._config)
        told = (record.rank, record.base, record.source, record.bytes)
        return AdapterInfo(name, *told, problem, note)


def _no_answer(name: str) -> AdapterAnswer:
    text = "the executor was lost before it answered, or has no time for it: try again"
    return AdapterAnswer("", name, "executor_failed", text)


def open_adapters(
    settings: Settings,
    engine: Path,
    config: LLMEngineRunnerConfig,
    *,
    tell: Callable[[ExecutorControl], bool],
    gone: Callable[[str], Awaitable[None]],
    served: Callable[[], None],
) -> AdapterStore:
    """Keep the adapters of the state directory for an engine; see `AdapterStore`."""
    # A simulated engine takes what the folder's own does.
    exported = load_config(engine) if config.backend == "simulated" else config
    folder = AdapterFolder(adapters_folder(settings.runtime.adapters, os.environ))
    return AdapterStore(folder, exported, tell=tell, gone=gone, served=served)


def adapters_folder(setting: str, environ: Mapping[str, str]) -> Path:
    """Folder of the adapters: as set, else in the service's state, else in the user's."""
    if setting:
        return Path(setting).absolute()
    states = environ.get("STATE_DIRECTORY", "")
    if states:
        # A service with several has them joined by colons.
        return Path(states.split(":")[0]) / "adapters"
    own = environ.get("XDG_STATE_HOME")
    return (Path(own) if own else _home() / ".local" / "state") / "hearth" / "adapters"


def _home() -> Path:
    """The user's home; for one that has none, as in many a container, where none can be made."""
    try:
        return Path.home()
    except RuntimeError:
        return Path("/nonexistent")
