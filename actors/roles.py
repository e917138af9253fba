from __future__ import annotations

import msgspec

from actors.addresses import Addresses, ExecutorAddresses
from actors.admission import PolicySettings
from actors.logs import Format, Level
from runtime.options import RuntimeOptions


class Role(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an actor needs to start anywhere; `addresses` are those that its process sees."""

    addresses: Addresses


class ExecutorRole(Role, frozen=True, tag="executor"):
    """An executor of the engine folder `engine`, listening at `inboxes`."""

    inboxes: ExecutorAddresses
    engine: str
    options: RuntimeOptions


class TokenizerRole(Role, frozen=True, tag="tokenizer"):
    """A tokenizer of the engine folder `engine`, listening at `inbox`."""

    inbox: tuple[str, ...]
    engine: str


class SchedulerRole(Role, frozen=True, tag="scheduler"):
    """A scheduler, listening at `inbox` and `control`."""

    inbox: tuple[str, ...]
    control: tuple[str, ...]
    policy: PolicySettings


AnyRole = ExecutorRole | TokenizerRole | SchedulerRole


class HostConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The one argument of an actor's process; `folder` is the one that paths are relative to."""

    name: str
    role: AnyRole
    parent: int
    folder: str
    log_level: Level = "info"
    log_format: Format = "auto"
