from collections.abc import Iterator

import pytest

from hearth.runtime.device.cuda.cuda_device import CudaDevice, open_cuda_device
from hearth.runtime.errors import HearthError


@pytest.fixture(scope="session")
def gpu() -> Iterator[CudaDevice]:
    try:
        device = open_cuda_device()
    except HearthError as error:
        pytest.skip(f"no GPU: {error.message}")
    yield device
    device.close()
