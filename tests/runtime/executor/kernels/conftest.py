from collections.abc import Iterator

import pytest

from hearth.runtime.device.cuda.cuda_device import open_cuda_device
from hearth.runtime.errors import HearthError
from tests.runtime.executor.kernels.lab import Lab


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    try:
        gpu = open_cuda_device()
    except HearthError as error:
        pytest.skip(f"no GPU: {error.message}")
    made = Lab(gpu)
    yield made
    made.close()
    gpu.close()
