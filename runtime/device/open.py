from hearth.runtime.config import DeviceKind
from hearth.runtime.device.cpu.cpu_device import CpuDevice
from hearth.runtime.device.device import Device
from hearth.runtime.device.measuring import MeasuringDevice


def open_device(kind: DeviceKind) -> Device:
    """The device of a kind; raises `engine_incompatible` if it cannot be used here."""
    if kind == "cpu":
        return CpuDevice()
    # The CUDA libraries are an extra: an installation for the CPU has none.
    from hearth.runtime.device.cuda.cuda_device import open_cuda_device  # noqa: PLC0415 - see above

    return open_cuda_device()


def measuring_device(kind: DeviceKind) -> MeasuringDevice:
    """A device that takes no memory, and counts the bytes that a device of this kind would take."""
    if kind == "cpu":
        return MeasuringDevice()
    from hearth.runtime.device.cuda.measuring_gpu import MeasuringGpu  # noqa: PLC0415 - as above

    return MeasuringGpu()
