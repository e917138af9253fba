"""What actors tell their supervisor of their life; see `hearth.actors.messages`."""

import msgspec

from hearth.actors.messages import ActorMessage, ExecutorLimits
from hearth.runtime.executor.graph_cache import GraphCounters
from hearth.runtime.generation.step_times import StageMetrics
from hearth.runtime.kv_cache.prefix_cache import PrefixMetrics
from hearth.runtime.loading import Stage
from hearth.runtime.runner.image_merge import MultimodalMetrics
from hearth.runtime.speculation.policy import EagleGenerationMetrics


class ActorHello(ActorMessage, tag="actor_hello"):
    """An actor process has begun to load."""

    name: str
    pid: int


class ActorLoading(ActorMessage, tag="actor_loading"):
    """How far an actor has come since its hello; see `hearth.runtime.loading`."""

    name: str
    stage: Stage
    share: float | None = None


class ActorReady(ActorMessage, tag="actor_ready"):
    """An actor can work; `facts` are shown by `status` and `check`. An executor tells limits.

    It also tells which adapters it found, and why it does not serve one ("" where it does).
    """

    name: str
    pid: int
    facts: dict[str, str | int | float] = msgspec.field(default_factory=dict)
    limits: ExecutorLimits | None = None
    adapters: dict[str, str] = msgspec.field(default_factory=dict)


class ExecutorMetrics(msgspec.Struct, array_like=True):
    """What an executor has done since it started, and its memory: see `BatchRuntime`.

    Rows have `adapter`, "" for none, and got another one `switches` times. `images` are all zero
    where none came.
    """

    prefill: StageMetrics
    generation: StageMetrics
    speculation: EagleGenerationMetrics
    graphs: dict[str, GraphCounters] = {}
    memory: dict[str, int] = {}
    device_free: int | None = None
    prefix: PrefixMetrics | None = None
    adapter: str = ""
    switches: int = 0
    images: MultimodalMetrics = msgspec.field(default_factory=MultimodalMetrics)


class ActorProgress(ActorMessage, tag="actor_progress"):
    """The actor's loop has turned: sent at most once a second, while it works or waits.

    An executor tells its metrics.
    """

    name: str
    metrics: ExecutorMetrics | None = None


class AdapterAnswer(ActorMessage, tag="adapter_answer"):
    """The executor has done what it was asked to with this adapter, or says why it could not."""

    name: str
    adapter: str
    code: str = ""
    message: str = ""
    field: str | None = None


class ActorFailed(ActorMessage, tag="actor_failed"):
    """The actor could not start or go on."""

    name: str
    code: str
    message: str
    field: str | None = None


SupervisorMessage = (
    ActorHello | ActorLoading | ActorReady | ActorProgress | AdapterAnswer | ActorFailed
)
