"""What the process of an actor is told when it starts, and what it tells when it can work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from hearth.actors.addresses import Addresses
from hearth.actors.arena import SharedArena
from hearth.actors.mailbox import Sender, ZmqContext
from hearth.actors.messages import ExecutorLimits
from hearth.actors.settings import EncoderOptions, LogSettings
from hearth.actors.supervisor_messages import SupervisorMessage
from hearth.runtime.options import RuntimeOptions


class HostConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The one argument of an actor's process; `role` says as what its `settings` are read.

    By `epoch` the log calls requests as the daemon does. The process inherits `descriptors`.
    """

    name: str
    role: str
    settings: msgspec.Raw
    addresses: Addresses
    parent: int
    logs: LogSettings = LogSettings()
    epoch: str = ""
    descriptors: tuple[int, ...] = ()


class ExecutorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an executor needs: the engine folder's absolute path, and how to run it.

    With a model that sees it reads `embeddings`, and where it runs the tower `patches`. An engine
    of another `identity` is refused (`engine_folder`).
    """

    engine: str
    options: RuntimeOptions
    identity: str = ""
    patches: SharedArena | None = None
    embeddings: SharedArena | None = None


class EncoderSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an encoder needs: the engine folder's absolute path, the arenas, and how to work.

    `options` are the executor's, of which it heeds what its `own` do not say. `identity` is as an
    executor's.
    """

    engine: str
    options: RuntimeOptions
    identity: str = ""
    pictures: SharedArena
    patches: SharedArena
    embeddings: SharedArena
    own: EncoderOptions = EncoderOptions()


class ReadyActor(NamedTuple):
    """An actor that can work: `run` does so until its control inbox says `Shutdown`."""

    run: Callable[[], None]
    facts: Mapping[str, str | int | float] = MappingProxyType({})
    limits: ExecutorLimits | None = None
    adapters: Mapping[str, str] = MappingProxyType({})


class Host(NamedTuple):
    """What a process gives to its actor: a name, addresses, and the way to its supervisor."""

    name: str
    addresses: Addresses
    context: ZmqContext
    to_supervisor: Sender[SupervisorMessage]


class Role(NamedTuple):
    """A kind of actor: the struct of its settings, and what makes it ready or raises HearthError.

    `prepare` imports what its own actor needs, so that no process has another's libraries.
    """

    settings: type[msgspec.Struct]
    prepare: Callable[[Host, Any], ReadyActor]
