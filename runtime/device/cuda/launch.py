import ctypes
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from runtime.device.cuda.compiler import KernelCompiler, kernel_source
from runtime.device.cuda.context import CudaContext
from runtime.device.cuda.driver import CudaDriver
from runtime.device.cuda.stream import CudaStream


class KernelLaunch:
    """A kernel with its arguments, packed once; change the value of one of `arguments` in place.

    `grid` counts blocks and `block` threads.
    """

    def __init__(
        self,
        context: CudaContext,
        stream: CudaStream,
        function: Any,
        block: int,
        arguments: Sequence[Any],
    ) -> None:
        self._driver = context.driver
        self._launch = context.driver.function("cuLaunchKernel")
        self._stream = stream.native
        self._function = function
        self._block = block
        self.arguments = tuple(arguments)
        self._pointers = pack_arguments(self.arguments)
        self._address = ctypes.addressof(self._pointers)
        self._dependent = context.takes_dependents

    def launch_dependent(self, x: int, y: int = 1) -> None:
        """Likewise, but that it may begin before what was queued last has ended.

        The kernel waits itself (`griddepcontrol.wait`) before it touches memory. GPUs before
        compute capability 9.0, and drivers before that of CUDA 12.3, begin it behind all else.
        """
        if not self._dependent:
            self.launch(x, y)
            return
        config = self._driver.api.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = x, y, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self._block, 1, 1
        config.hStream = self._stream
        config.attrs, config.numAttrs = [dependent_attribute(self._driver)], 1
        self._driver.call("cuLaunchKernelEx", config, self._function, self._address, 0)

    def launch(self, x: int, y: int = 1, z: int = 1) -> None:
        """Queue the kernel over a grid of blocks; raises what CUDA says."""
        (status,) = self._launch(
            self._function, x, y, z, self._block, 1, 1, 0, self._stream, self._address, 0
        )
        if status:
            raise self._driver.failure("cuLaunchKernel", status)


def dependent_attribute(driver: CudaDriver) -> Any:
    """What lets a launch begin before its predecessor has ended."""
    attribute = driver.api.CUlaunchAttribute()
    names = driver.api.CUlaunchAttributeID
    attribute.id = names.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute


def addresses(names: str) -> list[tuple[str, type[ctypes.c_uint64]]]:
    """Fields of a structure of arguments: device addresses of these names, in order."""
    return [(name, ctypes.c_uint64) for name in names.split()]


def integers(names: str) -> list[tuple[str, type[ctypes.c_int32]]]:
    """Likewise 32-bit integers."""
    return [(name, ctypes.c_int32) for name in names.split()]


def pack_arguments(arguments: Sequence[Any]) -> "ctypes.Array[ctypes.c_void_p]":
    """The array of addresses that a launch takes; `arguments` must outlive it."""
    pointers = [ctypes.addressof(argument) for argument in arguments]
    return (ctypes.c_void_p * len(pointers))(*pointers)


class Modules:
    """Compiled code of one package's sources by file and options, loaded when first asked for."""

    def __init__(self, context: CudaContext, compiler: KernelCompiler, *package: str) -> None:
        self._driver = context.driver
        self._compiler = compiler
        self._package = package
        self._loaded: dict[tuple[str, tuple[str, ...]], Any] = {}

    def compile(self, file: str, options: tuple[str, ...]) -> bytes:
        """The code of `{file}.cu`; threads may compile different ones at a time."""
        return self._compiler.compile(file, kernel_source(file, *self._package), options)

    def has(self, file: str, options: tuple[str, ...]) -> bool:
        """Tell whether `compile` would find it compiled."""
        return self._compiler.has(file, kernel_source(file, *self._package), options)

    def function(self, file: str, name: str, options: tuple[str, ...]) -> Any:
        """Kernel `name` of `{file}.cu`, compiled with `options`."""
        if (file, options) not in self._loaded:
            self.load(file, options, self.compile(file, options))
        return self._driver.call("cuModuleGetFunction", self._loaded[file, options], name.encode())

    def load(self, file: str, options: tuple[str, ...], code: bytes) -> None:
        """Load what `compile` gave, unless it is loaded."""
        if (file, options) not in self._loaded:
            self._loaded[file, options] = self._driver.call("cuModuleLoadData", code)

    def close(self) -> None:
        """Unload all of it."""
        with ExitStack() as closing:
            while self._loaded:
                _, module = self._loaded.popitem()
                closing.callback(self._driver.call, "cuModuleUnload", module)


class KernelLibrary:
    """Kernels of this package by file, options and name, compiled and loaded when first asked."""

    def __init__(self, context: CudaContext, stream: CudaStream, compiler: KernelCompiler) -> None:
        self.context = context
        self.stream = stream
        self.compiler = compiler
        self._modules = Modules(context, compiler)

    def prepare(
        self, file: str, name: str, options: tuple[str, ...], block: int, arguments: Sequence[Any]
    ) -> KernelLaunch:
        """A launch of kernel `name` of `kernels/{file}.cu`, compiled with `options`."""
        function = self._modules.function(file, name, options)
        return KernelLaunch(self.context, self.stream, function, block, arguments)

    def close(self) -> None:
        """Unload all kernels."""
        self._modules.close()
