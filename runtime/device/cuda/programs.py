from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple, Protocol

from runtime.device.cuda.compiler import CSRC, KernelCompiler, kernel_source
from runtime.device.cuda.context import CudaContext
from runtime.device.cuda.launch import KernelLaunch
from runtime.device.cuda.stream import CudaStream
from runtime.loading import Told, nobody

_ALL_SHARED = 100


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
        """Kernel `name` of `{file}.cu`, which may be launched with so much shared memory."""


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
    """Kernels by file and options, compiled and loaded when first asked for.

    Their sources are in `runtime/csrc`, or in another `package`.
    """

    def __init__(self, context: CudaContext, compiler: KernelCompiler, package: str = CSRC) -> None:
        self._driver = context.driver
        self._compiler = compiler
        self._package = package
        self._modules: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._kernels: dict[tuple[str, str, tuple[str, ...]], Any] = {}
        self._shared: dict[tuple[str, str, tuple[str, ...]], int] = {}

    def function(self, file: str, name: str, options: tuple[str, ...]) -> Any:
        """Kernel `name` of `{file}.cu`, compiled with `options`.

        Raises `internal` with the compiler's log.
        """
        if (file, options) not in self._modules:
            self._load(file, options, self._compile(file, options))
        return self._driver.call("cuModuleGetFunction", self._modules[file, options], name.encode())

    def kernel(
        self, file: str, name: str, macros: Mapping[str, int | str], shared_bytes: int = 0
    ) -> Any:
        """Kernel `name` of `{file}.cu` for steps; its blocks may be given `shared_bytes`.

        All ask for the largest share of shared memory: a multiprocessor that had to change it
        between two kernels would have to be empty in between. Raises as `function`, and
        `executor_failed` where the GPU does not give a block as much.
        """
        return self._kernel(KernelRequest(file, name, macro_options(macros), shared_bytes))

    def load(self, requests: Iterable[KernelRequest], threads: int, told: Told = nobody) -> None:
        """Compile these kernels, `threads` at a time, and load them; raises as `kernel`.

        Where some are not in the compiler's cache `told` hears the share of those.
        """
        wanted = dict.fromkeys(requests)
        sources = dict.fromkeys((one.file, one.options) for one in wanted)
        missing, done = {one for one in sources if not self._has(*one)}, 0
        if missing:
            told("compiling", 0.0)
        with ThreadPoolExecutor(threads) as pool:
            codes = pool.map(lambda one: self._compile(*one), sources)
            for (file, options), code in zip(sources, codes, strict=True):
                self._load(file, options, code)
                if (file, options) in missing:
                    told("compiling", (done := done + 1) / len(missing))
        if missing:
            told("opening", None)
        for request in wanted:
            self._kernel(request)

    def close(self) -> None:
        """Unload all of it."""
        self._kernels.clear()
        self._shared.clear()
        with ExitStack() as closing:
            while self._modules:
                _, module = self._modules.popitem()
                closing.callback(self._driver.call, "cuModuleUnload", module)

    def _has(self, file: str, options: tuple[str, ...]) -> bool:
        return self._compiler.has(file, kernel_source(file, self._package), options)

    def _compile(self, file: str, options: tuple[str, ...]) -> bytes:
        return self._compiler.compile(file, kernel_source(file, self._package), options)

    def _load(self, file: str, options: tuple[str, ...], code: bytes) -> None:
        if (file, options) not in self._modules:
            self._modules[file, options] = self._driver.call("cuModuleLoadData", code)

    def _kernel(self, request: KernelRequest) -> Any:
        key = (request.file, request.name, request.options)
        function = self._kernels.get(key)
        if function is None:
            function = self.function(*key)
            self._set(function, "PREFERRED_SHARED_MEMORY_CARVEOUT", _ALL_SHARED)
            self._kernels[key] = function
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


class KernelLibrary:
    """The kernels of a device's own ops, and the stream that they run on."""

    def __init__(self, context: CudaContext, stream: CudaStream, compiler: KernelCompiler) -> None:
        self.context = context
        self.stream = stream
        self.compiler = compiler
        self._programs = Programs(context, compiler)

    def prepare(
        self, file: str, name: str, options: tuple[str, ...], block: int, arguments: Sequence[Any]
    ) -> KernelLaunch:
        """A launch of kernel `name` of `{file}.cu`, compiled with `options`."""
        function = self._programs.function(file, name, options)
        return KernelLaunch(self.context, self.stream, function, block, arguments)

    def close(self) -> None:
        """Unload all kernels."""
        self._programs.close()
