from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple, Protocol

from hearth.runtime.device.cuda.compiler import CSRC, KernelCompiler, KernelConfig, kernel_source
from hearth.runtime.device.cuda.context import CudaContext
from hearth.runtime.device.cuda.launch import KernelLaunch
from hearth.runtime.device.cuda.stream import CudaStream
from hearth.runtime.loading import ProgressCallback, no_progress

_ALL_SHARED = 100


class Program(NamedTuple):
    """A source file, its `Config`, and options of the compiler beside."""

    file: str
    config: KernelConfig | None = None
    options: tuple[str, ...] = ()


class KernelRequest(NamedTuple):
    """A kernel of a source file, its `Config`, and its dynamic shared memory."""

    file: str
    name: str
    config: KernelConfig
    shared_bytes: int = 0

    @property
    def program(self) -> Program:
        """Program to compile for the kernel."""
        return Program(self.file, self.config)


class Kernels(Protocol):
    """Source of the kernels of launches."""

    def kernel(self, file: str, name: str, config: KernelConfig, shared_bytes: int = 0) -> Any:
        """Kernel `name` of `{file}.cu`, which may be launched with so much shared memory."""


class WantedKernels:
    """Recorder of the kernels that launches would use; its kernels cannot be launched."""

    def __init__(self) -> None:
        self.requests: dict[KernelRequest, None] = {}

    def kernel(self, file: str, name: str, config: KernelConfig, shared_bytes: int = 0) -> Any:
        """Keep the request; returns None."""
        self.requests[KernelRequest(file, name, config, shared_bytes)] = None


class Programs:
    """Kernels, compiled and loaded when first asked for.

    Their sources are in `runtime/csrc`, or in another `package`.
    """

    def __init__(self, context: CudaContext, compiler: KernelCompiler, package: str = CSRC) -> None:
        self._driver = context.driver
        self._compiler = compiler
        self._package = package
        self._modules: dict[Program, Any] = {}
        self._kernels: dict[KernelRequest, Any] = {}
        self._shared: dict[KernelRequest, int] = {}

    def function(self, program: Program, name: str) -> Any:
        """Kernel `name` of a program; raises `internal` with the compiler's log."""
        if program not in self._modules:
            self._load(program, self._compile(program))
        return self._driver.call("cuModuleGetFunction", self._modules[program], name.encode())

    def kernel(self, file: str, name: str, config: KernelConfig, shared_bytes: int = 0) -> Any:
        """Kernel `name` of `{file}.cu` for steps; its blocks may be given `shared_bytes`.

        All kernels ask for the largest share of shared memory: a multiprocessor that changes its
        share between two kernels has to be empty in between. Raises the errors of `function`, and
        `executor_failed` if the GPU does not give a block as many bytes.
        """
        return self._kernel(KernelRequest(file, name, config, shared_bytes))

    def load(
        self,
        requests: Iterable[KernelRequest],
        threads: int,
        progress: ProgressCallback = no_progress,
    ) -> None:
        """Compile these kernels, `threads` at a time, and load them; raises as `kernel`.

        `progress` gets the share that is compiled, if some kernels are not in the compiler's cache.
        """
        wanted = dict.fromkeys(requests)
        programs = dict.fromkeys(one.program for one in wanted)
        missing, done = {one for one in programs if not self._has(one)}, 0
        if missing:
            progress("compiling", 0.0)
        with ThreadPoolExecutor(threads) as pool:
            for program, code in zip(programs, pool.map(self._compile, programs), strict=True):
                self._load(program, code)
                if program in missing:
                    progress("compiling", (done := done + 1) / len(missing))
        if missing:
            progress("opening", None)
        for request in wanted:
            self._kernel(request)

    def close(self) -> None:
        """Unload all kernels."""
        self._kernels.clear()
        self._shared.clear()
        with ExitStack() as closing:
            while self._modules:
                _, module = self._modules.popitem()
                closing.callback(self._driver.call, "cuModuleUnload", module)

    def _has(self, program: Program) -> bool:
        return self._compiler.has(program.file, self._source(program), program.options)

    def _compile(self, program: Program) -> bytes:
        return self._compiler.compile(program.file, self._source(program), program.options)

    def _source(self, program: Program) -> str:
        return kernel_source(program.file, program.config, self._package)

    def _load(self, program: Program, code: bytes) -> None:
        if program not in self._modules:
            self._modules[program] = self._driver.call("cuModuleLoadData", code)

    def _kernel(self, request: KernelRequest) -> Any:
        key = request._replace(shared_bytes=0)
        function = self._kernels.get(key)
        if function is None:
            function = self.function(request.program, request.name)
            self._set(function, "PREFERRED_SHARED_MEMORY_CARVEOUT", _ALL_SHARED)
            self._kernels[key] = function
        if request.shared_bytes > self._shared.get(key, 0):
            self._set(function, "MAX_DYNAMIC_SHARED_SIZE_BYTES", request.shared_bytes)
            self._shared[key] = request.shared_bytes
        return function

    def _set(self, function: Any, name: str, number: int) -> None:
        key = getattr(self._driver.api.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
        self._driver.call("cuFuncSetAttribute", function, key, number)


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
        function = self._programs.function(Program(file, options=options), name)
        return KernelLaunch(self.context, self.stream, function, block, arguments)

    def close(self) -> None:
        """Unload all kernels."""
        self._programs.close()
