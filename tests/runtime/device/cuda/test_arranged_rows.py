import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from hearth.runtime.device.cuda.cuda_device import CudaDevice
from hearth.runtime.executor.simulated_engine import simulated_config
from tests.runtime.caches.arranged_rows import House, live

pytestmark = pytest.mark.gpu
CONFIG = structs.replace(
    simulated_config(layers=3, max_batch=6, capacity=64),
    device="cuda",
    dtype="float16",
    kv_cache_dtype="float16",
    num_kv_heads=2,
    head_dim=8,
)


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_rows_hold_what_they_held_wherever_they_are_placed(
    gpu: CudaDevice, data: st.DataObject
) -> None:
    live(House(CONFIG, gpu, gpu.read), data, 40)
