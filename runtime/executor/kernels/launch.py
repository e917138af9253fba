import ctypes
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

from runtime.device.cuda.clusters import largest_cluster
from runtime.device.cuda.compiler import KernelCompiler
from runtime.device.cuda.context import FIRST_WITH_DEPENDENTS, CudaContext
from runtime.device.cuda.launch import (
    Modules,
    dependent_attribute,
    pack_arguments,
)
from runtime.device.cuda.stream import CudaStream
from runtime.loading import Told, nobody

SOURCES = "runtime.executor.kernels.source"
_ALL_SHARED = 100


class GpuFacts(NamedTuple):
    """What the shape of kernels follows from; shared memory in bytes.

    `shared_per_block` is the most that a block may ask for, static memory included, and
    `largest_cluster` how many such blocks can be one cluster, 1 where there are none.
    """

    capability: tuple[int, int]
    multiprocessors: int
    shared_per_block: int
    shared_per_multiprocessor: int
    largest_cluster: int = 1

    @classmethod
    def of(cls, context: CudaContext) -> "GpuFacts":
        """Those of a context's GPU."""
        shared = context.attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        return cls(
            context.properties.compute_capability,
            context.properties.multiprocessors,
            shared,
            context.attribute("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
            largest_cluster(context, shared),
        )

    @property
    def dependent(self) -> bool:
        """Whether a kernel can begin before the one before it has ended."""
        return self.capability >= FIRST_WITH_DEPENDENTS


class KernelRequest(NamedTuple):
    """A kernel of a source file, the macros that it is compiled with, its dynamic shared memory."""

    file: str
    name: str
    options: tuple[str, ...]
    shared_bytes: int


class Kernels(Protocol):
    """Where launches get their kernels from."""

    def kernel(
        self, file: str, name: str, macros: Mapping[str, int | str], shared_bytes: int = 0
    ) -> Any:
        """Kernel `name` of `source/{file}.cu`, which may be launched with so much memory."""


class WantedKernels:
    """Takes down which kernels launches would use; what it hands out cannot be launched."""

    def __init__(self) -> None:
        self.requests: dict[KernelRequest, None] = {}

    def kernel(
        self, file: str, name: str, macros: Mapping[str, int | str], shared_bytes: int = 0
    ) -> Any:
        """Nothing; the request is kept."""
        self.requests[KernelRequest(file, name, macro_options(macros), shared_bytes)] = None


class Programs:
    """Kernels of `source/`, compiled and loaded once for each set of macros.

    All ask for the largest share of shared memory: a multiprocessor that had to change it between
    two kernels would have to be empty in between.
    """

    def __init__(
        self, context: CudaContext, compiler: KernelCompiler, *, facts: GpuFacts | None = None
    ) -> None:
        self.facts = facts or GpuFacts.of(context)
        self._driver = context.driver
        self._modules = Modules(context, compiler, SOURCES)
        self._functions: dict[tuple[str, str, tuple[str, ...]], Any] = {}
        self._shared: dict[tuple[str, str, tuple[str, ...]], int] = {}

    def kernel(
        self, file: str, name: str, macros: Mapping[str, int | str], shared_bytes: int = 0
    ) -> Any:
        """Kernel `name` of `source/{file}.cu`; its blocks may be given `shared_bytes`.

        Raises `internal` with the compiler's log, and `executor_failed` where the GPU does not
        give a block as much.
        """
        return self._kernel(KernelRequest(file, name, macro_options(macros), shared_bytes))

    def load(self, requests: Iterable[KernelRequest], threads: int, told: Told = nobody) -> None:
        """Compile these kernels, `threads` at a time, and load them; raises as `kernel`.

        Where some are not in the compiler's cache `told` hears the share of those.
        """
        wanted = dict.fromkeys(requests)
        sources = dict.fromkeys((one.file, one.options) for one in wanted)
        missing, done = {one for one in sources if not self._modules.has(*one)}, 0
        if missing:
            told("compiling", 0.0)
        with ThreadPoolExecutor(threads) as pool:
            codes = pool.map(lambda one: self._modules.compile(*one), sources)
            for (file, options), code in zip(sources, codes, strict=True):
                self._modules.load(file, options, code)
                if (file, options) in missing:
                    told("compiling", (done := done + 1) / len(missing))
        if missing:
            told("opening", None)
        for request in wanted:
            self._kernel(request)

    def close(self) -> None:
        """Unload all kernels."""
        self._functions.clear()
        self._shared.clear()
        self._modules.close()

    def _kernel(self, request: KernelRequest) -> Any:
        key = (request.file, request.name, request.options)
        function = self._functions.get(key)
        if function is None:
            function = self._modules.function(request.file, request.name, request.options)
            self._set(function, "PREFERRED_SHARED_MEMORY_CARVEOUT", _ALL_SHARED)
            self._functions[key] = function
        if request.shared_bytes > self._shared.get(key, 0):
            self._set(function, "MAX_DYNAMIC_SHARED_SIZE_BYTES", request.shared_bytes)
            self._shared[key] = request.shared_bytes
        return function

    def _set(self, function: Any, name: str, number: int) -> None:
        key = getattr(self._driver.api.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
        self._driver.call("cuFuncSetAttribute", function, key, number)


def macro_options(macros: Mapping[str, int | str]) -> tuple[str, ...]:
    """The compiler's options for these macros, in one order."""
    return tuple(f"-D{name}={macros[name]}" for name in sorted(macros))


class Launch(NamedTuple):
    """A kernel over a grid of blocks of `block` threads, with one structure as its argument.

    `shared_bytes` of a block are dynamic; `name` says what it does, for profiles. One that is
    `apart` never begins before its predecessor has ended: its few blocks would crowd on those
    multiprocessors that the predecessor's blocks leave first.
    """

    function: Any
    grid: tuple[int, int, int]
    block: int
    shared_bytes: int
    arguments: ctypes.Structure
    name: str
    apart: bool = False


class PackedStep:
    """Launches one behind the other, whose arguments hold still."""

    def __init__(
        self, context: CudaContext, launches: Sequence[Launch], configs: Sequence[Any]
    ) -> None:
        self.launches = tuple(launches)
        self._driver = context.driver
        self._launch = context.driver.function("cuLaunchKernelEx")
        self._pointers = pack_arguments([one.arguments for one in launches])
        first, size = ctypes.addressof(self._pointers), ctypes.sizeof(ctypes.c_void_p)
        self._calls = [
            (config, launch.function, first + index * size)
            for index, (launch, config) in enumerate(zip(launches, configs, strict=True))
        ]
        self._configs = list({id(config): config for config in configs}.values())

    def queue(self, stream: CudaStream) -> None:
        """Queue all of them; raises what CUDA says, naming the launch."""
        for config in self._configs:
            config.hStream = stream.native
        launch = self._launch
        for config, function, arguments in self._calls:
            (status,) = launch(config, function, arguments, 0)
            if status:
                raise self._failure(arguments, status)

    def _failure(self, arguments: int, status: Any) -> Exception:
        offset = arguments - ctypes.addressof(self._pointers)
        name = self.launches[offset // ctypes.sizeof(ctypes.c_void_p)].name
        return self._driver.failure(f"cuLaunchKernelEx of {name}", status)


class Launcher:
    """Packs launches into steps.

    With `dependent` each launch may begin before the one before it has ended: its kernel itself
    waits (`griddepcontrol.wait`) before it reads what that one writes. A driver that cannot capture
    such launches gets none, and the kernels' waits are over at once.
    """

    def __init__(self, context: CudaContext, *, dependent: bool) -> None:
        self._context = context
        self._dependent = dependent and context.takes_dependents

    def pack(self, launches: Sequence[Launch]) -> PackedStep:
        """What can be queued as often as one likes; it keeps the structures of the arguments."""
        shapes = [(one.grid, one.block, one.shared_bytes, one.apart) for one in launches]
        first = dict(zip(reversed(shapes), reversed(launches), strict=True))
        configs = {shape: self._config(one) for shape, one in first.items()}
        return PackedStep(self._context, launches, [configs[shape] for shape in shapes])

    def _config(self, launch: Launch) -> Any:
        config = self._context.driver.api.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = launch.block, 1, 1
        config.sharedMemBytes = launch.shared_bytes
        if self._dependent and not launch.apart:
            config.attrs = [dependent_attribute(self._context.driver)]
            config.numAttrs = 1
        return config
