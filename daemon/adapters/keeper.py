"""The adapters that are served: the folder's, as far as an executor takes them."""

import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.to_thread
import structlog
from msgspec import structs

from actors.executor_messages import ExecutorControl, LoadAdapter, UnloadAdapter
from actors.supervisor_messages import AdapterAnswer
from daemon.adapters.folder import AdapterFolder
from daemon.configuration.places import adapters_folder
from daemon.configuration.settings import Settings
from daemon.control.messages import (
    AdapterAdded,
    AdapterInfo,
    AdapterList,
    AdapterRemoved,
    AddAdapter,
    ControlRequest,
    ListAdapters,
    RemoveAdapter,
)
from daemon.control.server import Handler
from runtime.adapters.adapter import other_base
from runtime.adapters.stored import AdapterRecord
from runtime.config import LLMEngineRunnerConfig, load_config
from runtime.errors import HearthError, known_code

_ANSWER_S = 45.0
_log = structlog.get_logger("hearth.adapters")


@dataclass
class _Asked:
    """What an executor was asked to do with an adapter."""

    name: str
    answer: AdapterAnswer | None = None
    answered: anyio.Event = field(default_factory=anyio.Event)


class AdapterKeeper:
    """Adds and removes adapters while requests run, one at a time, and knows which are served.

    `tell` posts to the executor that works, and says whether there is one; `gone` tells who has
    requests that wait. `served` is called where `names` are others.
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
        self._asked = _Asked("")

    @property
    def names(self) -> list[str]:
        """The adapters that clients may ask for."""
        return [name for name, problem in sorted(self._problems.items()) if not problem]

    @property
    def handlers(self) -> dict[type[ControlRequest], Handler]:
        """What the owner may ask."""
        return {AddAdapter: self._add, RemoveAdapter: self._remove, ListAdapters: self._list}

    def executor_ready(self, adapters: Mapping[str, str], model: str = "") -> None:
        """An executor works, and told of all that it found why it does not serve it, or "".

        `model` is whose external weights it has, where the engine has none itself.
        """
        self._working = True
        if model:
            self._config = structs.replace(self._config, model_name=model)
        kept = self._kept()
        found = {name: adapters[name] for name in set(kept) & set(adapters) - self._stale}
        self._stale.clear()
        # What was added while it was starting it may have missed, and what was removed not.
        for name in sorted(set(adapters) - set(found)):
            self._tell(UnloadAdapter(name))
        for name in sorted(set(kept) - set(found)):
            self._tell(LoadAdapter(name, str(self._folder.of(name))))
        self._problems = {name: found.get(name, "") for name in kept}
        for name in self.names:
            with suppress(HearthError):  # What is wrong with its files is told where it is loaded.
                self._note(name, self._folder.record(name))
        self._served()

    def executor_lost(self) -> None:
        """There is no executor: the next one finds what is kept."""
        self._working = False
        self._asked.answered.set()

    def answered(self, answer: AdapterAnswer) -> None:
        """The executor has done what it was told to, or could not."""
        if answer.adapter == self._asked.name:
            self._asked.answer = answer
            self._asked.answered.set()
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
                # It may have it all the same, or take it later, when nobody waits any more.
                self._tell(UnloadAdapter(name))
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
        await self._ask(name, UnloadAdapter(name))

    async def _list(self, _asked: ListAdapters) -> AdapterList:
        found = await anyio.to_thread.run_sync(self._look)
        return AdapterList(str(self._folder.path), self._config.max_supported_lora_rank, found)

    async def _load(self, name: str) -> None:
        answer = await self._ask(name, LoadAdapter(name, str(self._folder.of(name))))
        if answer is not None and answer.code:
            raise HearthError(known_code(answer.code), answer.message, answer.field)

    async def _ask(self, name: str, message: ExecutorControl) -> AdapterAnswer | None:
        """What the executor answers; None where none works."""
        asked = self._asked = _Asked(name)
        if not self._working or not self._tell(message):
            return None
        with anyio.move_on_after(_ANSWER_S):
            await asked.answered.wait()
        self._asked = _Asked("")
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
) -> AdapterKeeper:
    """Keep the adapters of the state directory for an engine; see `AdapterKeeper`."""
    # A simulated engine takes what the folder's own does.
    exported = load_config(engine) if config.backend == "simulated" else config
    folder = AdapterFolder(adapters_folder(settings.runtime.adapters, os.environ))
    return AdapterKeeper(folder, exported, tell=tell, gone=gone, served=served)
