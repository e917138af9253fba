import ctypes
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from runtime.device.cuda.compiler import KernelCompiler, kernel_source
from runtime.device.cuda.context import CudaContext
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

    def launch(self, x: int, y: int = 1, z: int = 1) -> None:
        """Queue the kernel over a grid of blocks; raises what CUDA says."""
        (status,) = self._launch(
            self._function, x, y, z, self._block, 1, 1, 0, self._stream, self._address, 0
        )
        if status:
            raise self._driver.failure("cuLaunchKernel", status)


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


class KernelLibrary:
    """Kernels of this package by file, options and name, compiled and loaded when first asked."""

    def __init__(self, context: CudaContext, stream: CudaStream, compiler: KernelCompiler) -> None:
        self.context = context
        self.stream = stream
        self._compiler = compiler
        self._modules: dict[tuple[str, tuple[str, ...]], Any] = {}

    def prepare(
        self, file: str, name: str, options: tuple[str, ...], block: int, arguments: Sequence[Any]
    ) -> KernelLaunch:
        """A launch of kernel `name` of `kernels/{file}.cu`, compiled with `options`."""
        module = self._modules.get((file, options))
        if module is None:
            cubin = self._compiler.compile(file, kernel_source(file), options)
            module = self.context.driver.call("cuModuleLoadData", cubin)
            self._modules[file, options] = module
        function = self.context.driver.call("cuModuleGetFunction", module, name.encode())
        return KernelLaunch(self.context, self.stream, function, block, arguments)

    def close(self) -> None:
        """Unload all kernels."""
        with ExitStack() as closing:
            while self._modules:
                _, module = self._modules.popitem()
                closing.callback(self.context.driver.call, "cuModuleUnload", module)
