"""Settings of an actor's process, and the actor that it runs once it is ready."""

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
    """The one argument of an actor's process; `role` is the key in `ROLES` of its `settings`.

    With `epoch` the log names requests as the daemon does. The process inherits `descriptors`.
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
    """Settings of an executor: the engine folder's absolute path, and options to run it.

    With a vision model it reads `embeddings`, and `patches` if it runs the vision encoder. An
    engine of another `identity` is refused (`engine_folder`).
    """

    engine: str
    options: RuntimeOptions
    identity: str = ""
    patches: SharedArena | None = None
    embeddings: SharedArena | None = None


class EncoderSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of an encoder: the engine folder's absolute path, the arenas, and options.

    `options` are the executor's; `own` has those that only the encoder has. `identity` is as an
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
    """An actor that has loaded: `run` returns after `Shutdown` at its control inbox."""

    run: Callable[[], None]
    facts: Mapping[str, str | int | float] = MappingProxyType({})
    limits: ExecutorLimits | None = None
    adapters: Mapping[str, str] = MappingProxyType({})


class Host(NamedTuple):
    """The context of an actor in its process: name, addresses, mailbox of its supervisor."""

    name: str
    addresses: Addresses
    context: ZmqContext
    to_supervisor: Sender[SupervisorMessage]


class Role(NamedTuple):
    """A kind of actor: the struct of its settings, and its factory, which raises HearthError.

    `prepare` imports what its own actor needs, so that no process loads another's libraries.
    """

    settings: type[msgspec.Struct]
    prepare: Callable[[Host, Any], ReadyActor]
