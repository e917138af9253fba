import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

from hearth.runtime.device.cuda.context import CudaContext
from hearth.runtime.device.cuda.driver import CudaDriver
from hearth.runtime.device.cuda.stream import CudaStream

Grid = tuple[int, int, int]


def launch_config(
    driver: CudaDriver,
    grid: Grid,
    block: int,
    shared_bytes: int = 0,
    attributes: Sequence[Any] = (),
) -> Any:
    """Make a launch configuration: a grid of blocks of `block` threads, on the null stream."""
    config = driver.api.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
    config.sharedMemBytes = shared_bytes
    if attributes:
        config.attrs, config.numAttrs = list(attributes), len(attributes)
    return config


def programmatic_launch(driver: CudaDriver) -> Any:
    """The attribute that lets a launch begin before its predecessor has ended."""
    attribute = driver.api.CUlaunchAttribute()
    names = driver.api.CUlaunchAttributeID
    attribute.id = names.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute


def addresses(names: str) -> list[tuple[str, type[ctypes.c_uint64]]]:
    """Fields of a structure of arguments: device addresses of these names, in order."""
    return [(name, ctypes.c_uint64) for name in names.split()]


def integers(names: str) -> list[tuple[str, type[ctypes.c_int32]]]:
    """Fields of a structure of arguments: 32-bit integers of these names, in order."""
    return [(name, ctypes.c_int32) for name in names.split()]


def pack_arguments(arguments: Sequence[Any]) -> "ctypes.Array[ctypes.c_void_p]":
    """The array of addresses that a launch takes; `arguments` must outlive it."""
    pointers = [ctypes.addressof(argument) for argument in arguments]
    return (ctypes.c_void_p * len(pointers))(*pointers)


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
        """Queue the kernel, which may begin before its predecessor in the stream has ended.

        The kernel waits itself (`griddepcontrol.wait`) before it touches memory. GPUs before
        compute capability 9.0, and drivers before CUDA 12.3, begin it behind all queued work.
        """
        if not self._dependent:
            self.launch(x, y)
            return
        attributes = [programmatic_launch(self._driver)]
        config = launch_config(self._driver, (x, y, 1), self._block, attributes=attributes)
        config.hStream = self._stream
        self._driver.call("cuLaunchKernelEx", config, self._function, self._address, 0)

    def launch(self, x: int, y: int = 1, z: int = 1) -> None:
        """Queue the kernel over a grid of blocks; raises CUDA's error."""
        (status,) = self._launch(
            self._function, x, y, z, self._block, 1, 1, 0, self._stream, self._address, 0
        )
        if status:
            raise self._driver.failure("cuLaunchKernel", status)


class Launch(NamedTuple):
    """A kernel over a grid of blocks of `block` threads, with one structure as its argument.

    `shared_bytes` of a block are dynamic; `name` is for profiles. A launch that is `apart` never
    begins before its predecessor has ended: its few blocks would crowd on the multiprocessors that
    the predecessor's blocks leave first.
    """

    function: Any
    grid: Grid
    block: int
    shared_bytes: int
    arguments: ctypes.Structure
    name: str
    apart: bool = False


class PackedStep:
    """Launches one behind the other, with arguments that do not change."""

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
        """Queue all launches; raises CUDA's error, naming the launch."""
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
    """Packer of launches into steps.

    With `dependent` each launch may begin before its predecessor has ended: its kernel itself waits
    (`griddepcontrol.wait`) before it reads the predecessor's output. A driver that cannot capture
    dependent launches gets ordinary ones, and the kernels' waits are over at once.
    """

    def __init__(self, context: CudaContext, *, dependent: bool) -> None:
        self._context = context
        self._dependent = dependent and context.takes_dependents

    def pack(self, launches: Sequence[Launch]) -> PackedStep:
        """Pack launches for repeated queueing; the step keeps their argument structures alive."""
        shapes = [(one.grid, one.block, one.shared_bytes, one.apart) for one in launches]
        configs = {one: self._config(*one[:3], apart=one[3]) for one in dict.fromkeys(shapes)}
        return PackedStep(self._context, launches, [configs[shape] for shape in shapes])

    def _config(self, grid: Grid, block: int, shared_bytes: int, *, apart: bool) -> Any:
        driver = self._context.driver
        early = self._dependent and not apart
        attributes = [programmatic_launch(driver)] if early else []
        return launch_config(driver, grid, block, shared_bytes, attributes)
