from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from hearth.runtime.device.cpu.cpu_device import CpuDevice
from hearth.runtime.executor.simulated_engine import simulated_config
from tests.runtime.caches.arranged_rows import House, live

CONFIG = structs.replace(simulated_config(layers=2, max_batch=4, capacity=700), num_kv_heads=2)


@given(st.data())
def test_rows_hold_what_they_held_wherever_they_are_placed(data: st.DataObject) -> None:
    live(House(CONFIG, CpuDevice(), lambda tensor: tensor.array), data, 400)
