"""Messages from actors to their supervisors; see `hearth.actors.messages`."""

import msgspec

from hearth.actors.messages import ActorMessage, ExecutorLimits
from hearth.runtime.executor.engine import GraphCounters
from hearth.runtime.generation.step_times import StageMetrics
from hearth.runtime.kv_cache.prefix_cache import PrefixMetrics
from hearth.runtime.loading import Stage
from hearth.runtime.runner.image_merge import MultimodalMetrics
from hearth.runtime.speculation.policy import EagleGenerationMetrics


class ActorHello(ActorMessage, tag="actor_hello"):
    """The process of an actor begins to load."""

    name: str
    pid: int


class ActorLoading(ActorMessage, tag="actor_loading"):
    """Progress of an actor's loading since its hello; see `hearth.runtime.loading`."""

    name: str
    stage: Stage
    share: float | None = None


class ActorReady(ActorMessage, tag="actor_ready"):
    """An actor can work; `facts` are shown by `status` and `check`.

    An executor reports its limits, and each adapter that it found with the reason why it does not
    serve it ("" if it does).
    """

    name: str
    pid: int
    facts: dict[str, str | int | float] = msgspec.field(default_factory=dict)
    limits: ExecutorLimits | None = None
    adapters: dict[str, str] = msgspec.field(default_factory=dict)


class ExecutorMetrics(msgspec.Struct, array_like=True):
    """Counters of an executor since its start, and its memory: see `BatchRuntime`.

    `adapter` is the rows' adapter, "" for none; `switches` counts its changes. The counts of
    `images` are zero if no image came.
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
    """Sign that the actor's loop goes on: sent at most once a second, while it works or waits.

    An executor adds its metrics.
    """

    name: str
    metrics: ExecutorMetrics | None = None


class AdapterAnswer(ActorMessage, tag="adapter_answer"):
    """Result of a `SetAdapter`: done if `code` is empty, else an error."""

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
