"""The memory that engines will need, and the largest batch and capacity that fit into what is free.

Nothing here asks a machine: free memory is given in bytes, that of the host and that of a GPU. A
GPU without memory of its own (Jetson, DGX Spark) has None there, and shares the host's.
"""

import msgspec
from msgspec import structs

from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.errors import HearthError
from hearth.runtime.generation.deployment import DeploymentConfig, StoredEngines
from hearth.runtime.generation.predicted import predict_memory
from hearth.runtime.kv_cache.page_pool import page_bytes
from hearth.runtime.memory.estimates import LOADING
from hearth.runtime.options import RuntimeOptions

LEAST_CAPACITY = 1024
"""Slots of a row below which capacity is not lowered for memory."""
_MARGIN = 8
"""Divisor of free memory: this part is left free by sizes that no option asked for."""
_HALVED = 5
"""Number of halvings of the prefix cache before it is left out."""


class Budget(msgspec.Struct, frozen=True):
    """Bytes by part that an engine will need, and bytes that are free; `where` names the memory."""

    parts: dict[str, int]
    available: int
    where: str = ""

    @property
    def needed(self) -> int:
        """The sum of the parts."""
        return sum(self.parts.values())

    def fits(self, *, margin: bool) -> bool:
        """Return True if the free memory suffices, with a `margin` for other processes if asked."""
        left = self.available // _MARGIN if margin else 0
        return self.needed <= self.available - left

    def __str__(self) -> str:
        """Needed and free memory, for a message."""
        needed = -(-self.needed >> 20)
        return f"{needed} MiB{self.where} and {self.available >> 20} MiB are free"


def budgets_of(deployment: DeploymentConfig, host: int, gpu: int | None) -> list[Budget]:
    """A budget for each memory that the engines lie in, that of their device first.

    `gpu` is what is free beside a context, whose place the engine's takes.
    """
    parts, beside = predict_memory(deployment)
    pictures = {"vision_memory": deployment.image_memory} if deployment.image_memory else {}
    if deployment.base.device == "cpu":
        return [Budget(parts | pictures, host)]
    if deployment.tower is not None:
        beside |= pictures
    if gpu is not None:
        free = gpu + parts["context"]
        return [Budget(parts, free, " on the GPU"), Budget(beside, host, " on the host")]
    # What is read while loading are pages of files: where it gets tight the system drops them.
    kept = {f"host_{name}": n for name, n in beside.items() if not name.endswith(LOADING)}
    return [Budget(parts | kept, host, " of the memory that GPU and host share")]


def fit_deployment(
    engines: StoredEngines, options: RuntimeOptions, host: int, gpu: int | None
) -> DeploymentConfig:
    """The engines within the limits asked for; those that are not are as large as memory allows.

    What is chosen leaves an eighth of the free memory to others. First the prefix cache is smaller,
    down to none, as what it has not is computed. Then there are fewer rows, as a request can wait
    for a row, and then less capacity, without which it is refused. Raises `out_of_memory`, and what
    `resolve_deployment` does.
    """
    largest = engines.resolve(options)
    choices = _choices(largest.base, options)
    margin = len(choices) > 1
    others = ", an eighth of it for others" if margin else ""
    caches = _caches(largest, options)
    tried = [
        *((*choices[0], cache) for cache in caches),
        *((*choice, caches[-1]) for choice in choices[1:]),
    ]
    first = ""
    lacking: list[Budget] = []
    for rows, capacity, cache in tried:
        asked = structs.replace(options, max_batch=rows, capacity=capacity, **cache)
        deployment = engines.resolve(asked)
        lacking = [one for one in budgets_of(deployment, host, gpu) if not one.fits(margin=margin)]
        if not lacking:
            return deployment._replace(chosen=first and f"{_named(asked, options)}: {first}")
        first = first or f"{_named(asked, options)} would take {lacking[0]}{others}"
    if margin:
        what = f"{_rows(asked)} would take {lacking[0]}{others}: free some, or"
    else:
        what = f"the engine needs {lacking[0]}: lower max_batch or capacity, or"
    raise HearthError("out_of_memory", f"{what} export with int8 or int4", "capacity")


def _choices(config: LLMEngineRunnerConfig, options: RuntimeOptions) -> list[tuple[int, int]]:
    """Rows and capacities in the order in which they are tried; what is asked for stays."""
    rows, capacity = config.max_supported_batch_size, config.max_kv_cache_capacity
    # A plan has the sizes that it was built with.
    built = config.static_decode_batches
    batches = built or _powers(1, rows)
    fewer = [] if options.max_batch else [one for one in batches if one < rows]
    smaller = [] if options.capacity or built else _powers(LEAST_CAPACITY, capacity)
    least = min([rows, *fewer])
    return [
        (rows, capacity),
        *((one, capacity) for one in reversed(fewer)),
        *((least, one) for one in reversed(smaller)),
    ]


def _caches(largest: DeploymentConfig, options: RuntimeOptions) -> list[dict[str, int]]:
    """Sizes of the prefix cache to try: those asked for first, then less, and none at last.

    Pages on disk come from memory: where that has none they are left out.
    """
    nothing = dict.fromkeys(("prefix_cache_bytes", "prefix_host_bytes", "prefix_disk_bytes"), 0)
    if not largest.prefix.device:
        return [nothing]
    page = page_bytes(largest.base, largest.draft)
    asked = {name: getattr(options, name) for name in nothing}
    smaller = [
        {
            "prefix_cache_bytes": asked["prefix_cache_bytes"] >> halved,
            "prefix_host_bytes": asked["prefix_host_bytes"] >> halved,
        }
        for halved in range(1, _HALVED)
    ]
    return [asked, *(one for one in smaller if page <= min(filter(None, one.values()))), nothing]


def _powers(least: int, limit: int) -> list[int]:
    """The powers of two from `least`, which is one, to below `limit`."""
    return [1 << n for n in range(least.bit_length() - 1, (limit - 1).bit_length())]


def _named(asked: RuntimeOptions, options: RuntimeOptions) -> str:
    if not options.prefix_cache_bytes:
        return _rows(asked)
    cache = asked.prefix_cache_bytes >> 20
    return f"{_rows(asked)} and {f'a prefix cache of {cache} MiB' if cache else 'no prefix cache'}"


def _rows(asked: RuntimeOptions) -> str:
    return f"{asked.max_batch} row{'s' * (asked.max_batch > 1)} of {asked.capacity} tokens"
