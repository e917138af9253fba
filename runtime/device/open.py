from runtime.config import DeviceKind
from runtime.device.cpu.cpu_device import CpuDevice
from runtime.device.device import Device


def open_device(kind: DeviceKind) -> Device:
    """The device of a kind; raises `engine_incompatible` when it cannot be used here."""
    if kind == "cpu":
        return CpuDevice()
    # The CUDA libraries are an extra: an installation for the CPU has none.
    from runtime.device.cuda.cuda_device import open_cuda_device  # noqa: PLC0415 - see above

    return open_cuda_device()
