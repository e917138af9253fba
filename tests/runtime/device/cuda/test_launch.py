import ctypes
from importlib.resources import files
from typing import Any

import numpy as np
import pytest

from hearth.runtime.batch import RowMove
from hearth.runtime.device.cuda.context import CudaContext
from hearth.runtime.device.cuda.cuda_device import RotaryArguments
from hearth.runtime.device.cuda.driver import CudaDriver
from hearth.runtime.device.cuda.element_types import copy_unit, float_type, index_type
from hearth.runtime.device.cuda.launch import KernelLaunch, Launch, Launcher, pack_arguments
from hearth.runtime.device.cuda.ops import FeedArguments, LengthsArguments
from hearth.runtime.device.cuda.sample_ring import RESULT
from hearth.runtime.device.cuda.sampler import CAPTURED_SLOTS, BatchArguments
from hearth.runtime.device.cuda.storage import (
    MOVES,
    Moves,
    PathArguments,
    RowsArguments,
    queue_moves,
)
from hearth.runtime.device.cuda.stream import CudaStream
from hearth.runtime.device.cuda.tree_ops import FinishArguments, NodesArguments, ProposalArguments
from hearth.runtime.device.cuda.walks import WalkArguments
from hearth.runtime.device.cuda.wide_draws import (
    ROW,
    SPOTS,
    WORK_BYTES,
    WideArguments,
    is_greedy,
    row_settings,
)
from hearth.runtime.errors import HearthError
from hearth.runtime.request import RequestOptions
from tests.runtime.device.cuda.fake_driver import CUresult, FakeDriver


def launch_of(api: FakeDriver, *arguments: Any) -> KernelLaunch:
    context = CudaContext(CudaDriver(api))
    return KernelLaunch(context, CudaStream(context), "kernel", 128, arguments)


def test_arguments_are_packed_once_and_read_when_launched() -> None:
    number, address = ctypes.c_int32(5), ctypes.c_uint64(1 << 40)
    pointers = pack_arguments((number, address))
    number.value = 6
    assert ctypes.c_int32.from_address(pointers[0] or 0).value == 6
    assert ctypes.c_uint64.from_address(pointers[1] or 0).value == 1 << 40


def test_a_launch_is_one_call_and_its_failure_is_named() -> None:
    api = FakeDriver()
    launch = launch_of(api, ctypes.c_int32(1))
    launch.launch(3, 2)
    name, *arguments = api.calls[-1]
    assert name == "cuLaunchKernel"
    assert arguments[:9] == ["kernel", 3, 2, 1, 128, 1, 1, 0, 17]
    api.failing["cuLaunchKernel"] = CUresult.CUDA_ERROR_INVALID_VALUE
    launch = launch_of(api, ctypes.c_int32(1))
    with pytest.raises(HearthError, match="cuLaunchKernel failed: CUDA_ERROR_INVALID_VALUE"):
        launch.launch(1)


@pytest.mark.parametrize(
    ("version", "call"), [(12020, "cuLaunchKernel"), (12030, "cuLaunchKernelEx")]
)
def test_a_launch_is_early_where_the_driver_captures_that(version: int, call: str) -> None:
    api = FakeDriver()
    api.results["cuDriverGetVersion"] = (version,)
    launch_of(api, ctypes.c_int32(1)).launch_dependent(3)
    assert api.calls[-1][0] == call


class Arguments(ctypes.Structure):
    _fields_ = (("address", ctypes.c_uint64), ("count", ctypes.c_int32))


def launch_named(name: str, grid: tuple[int, int, int], shared_bytes: int = 0) -> Launch:
    return Launch(f"function {name}", grid, 256, shared_bytes, Arguments(1 << 40, 7), name)


def test_a_driver_that_captures_no_early_launches_gets_none() -> None:
    api = FakeDriver()
    api.results["cuDriverGetVersion"] = (12020,)
    context = CudaContext(CudaDriver(api))
    step = Launcher(context, dependent=True).pack([launch_named("only", (1, 1, 1))])
    api.calls.clear()
    step.queue(CudaStream(context))
    config = api.calls[-1][1]
    assert not hasattr(config, "attrs")


def test_a_step_is_one_call_a_launch_with_its_structure_by_value() -> None:
    api = FakeDriver()
    context = CudaContext(CudaDriver(api))
    launches = [launch_named("first", (3, 2, 1)), launch_named("second", (5, 1, 1), 1 << 16)]
    step = Launcher(context, dependent=True).pack([*launches, launches[0]])
    stream = CudaStream(context)
    api.calls.clear()
    step.queue(stream)
    step.queue(stream)
    assert api.names() == ["cuLaunchKernelEx"] * 6
    _, config, function, arguments, extra = api.calls[1]
    assert (config.gridDimX, config.gridDimY, config.blockDimX) == (5, 1, 256)
    assert (config.sharedMemBytes, config.hStream, config.numAttrs) == (1 << 16, 17, 1)
    assert (function, extra) == ("function second", 0)
    structure = Arguments.from_address(ctypes.c_uint64.from_address(arguments).value)
    assert (structure.address, structure.count) == (1 << 40, 7)


def test_a_launch_that_is_apart_waits_for_its_predecessor_to_end() -> None:
    api = FakeDriver()
    context = CudaContext(CudaDriver(api))
    one = launch_named("one", (3, 1, 1))
    step = Launcher(context, dependent=True).pack([one, one._replace(apart=True), one])
    stream = CudaStream(context)
    api.calls.clear()
    step.queue(stream)
    assert [hasattr(call[1], "attrs") for call in api.calls] == [True, False, True]


def test_launches_wait_for_one_another_where_the_gpu_knows_no_dependents() -> None:
    api = FakeDriver()
    context = CudaContext(CudaDriver(api))
    step = Launcher(context, dependent=False).pack([launch_named("only", (1, 1, 1))])
    step.queue(CudaStream(context))
    assert not hasattr(api.calls[-1][1], "attrs")


def test_a_launch_of_a_step_that_fails_is_named() -> None:
    api = FakeDriver()
    context = CudaContext(CudaDriver(api))
    step = Launcher(context, dependent=False).pack([launch_named("only", (1, 1, 1))])
    api.failing["cuLaunchKernelEx"] = CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(HearthError, match="cuLaunchKernelEx of only failed"):
        step.queue(CudaStream(context))


def test_structures_have_the_sizes_of_the_kernels() -> None:
    sizes = [ctypes.sizeof(kind) for kind in (FeedArguments, RowsArguments, BatchArguments)]
    assert sizes == [104, 24, 104]
    kinds = (NodesArguments, ProposalArguments, FinishArguments, PathArguments, WalkArguments)
    assert ctypes.sizeof(WideArguments) == 24
    assert 2 * SPOTS * 41016 == WORK_BYTES
    assert [ctypes.sizeof(kind) for kind in kinds] == [40, 128, 56, 16, 64]
    assert ctypes.sizeof(RotaryArguments) == 64
    assert ctypes.sizeof(LengthsArguments) == 8 + 4 * 256
    assert ctypes.sizeof(Moves) == 4 + 3 * 4 * MOVES
    assert (ROW.itemsize, RESULT.itemsize) == (48, 184)


def test_host_and_device_take_turns_among_as_many_slots_of_recorded_picks() -> None:
    source = (files("hearth.runtime.csrc") / "sampling" / "rows.cuh").read_text()
    assert f"#define SLOTS {CAPTURED_SLOTS}\n" in source


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        (256, (16, "uint4")),
        (24, (8, "uint2")),
        (12, (4, "unsigned")),
        (514, (2, "unsigned short")),
    ],
)
def test_rows_are_copied_in_the_widest_unit(nbytes: int, expected: tuple[int, str]) -> None:
    assert copy_unit(nbytes) == expected


def test_a_type_without_a_kernel_is_refused() -> None:
    assert index_type(np.dtype(np.int32), "start") == "int"
    assert float_type(np.dtype(np.float16), "table") == "half_bits"
    with pytest.raises(HearthError, match="no CUDA kernel for start of type uint8"):
        index_type(np.dtype(np.uint8), "start")
    with pytest.raises(HearthError, match="no CUDA kernel for table of type float64"):
        float_type(np.dtype(np.float64), "table")
    with pytest.raises(HearthError, match="3 bytes"):
        copy_unit(3)


def moved(moves: list[RowMove]) -> list[tuple[int, ...]]:
    """The grids that are launched for `moves` of rows of 3 heads, 10 slots, 100 units."""
    api = FakeDriver()
    rows, table = RowsArguments(0, 3, 10, 100), Moves()
    queue_moves(launch_of(api, rows, table), rows, table, moves, 4)
    return [call[2:5] for call in api.calls if call[0] == "cuLaunchKernel"]


def test_moves_cover_the_used_slots_alone() -> None:
    assert moved([RowMove(0, 0, 9), RowMove(2, 1, 4), RowMove(3, 2, 5)]) == [(2, 3, 4)]
    assert moved([RowMove(0, 0, 9), RowMove(2, 1, 0)]) == []
    assert moved([RowMove(1, 3, 9), RowMove(0, 1, 9)]) == [(4, 3, 4)]
    assert moved([RowMove(i + 1, i, 1) for i in range(MOVES + 1)]) == [(1, 3, 4)] * 2


@pytest.mark.parametrize(
    "moves",
    [
        [RowMove(0, 1, 4), RowMove(1, 2, 4)],
        [RowMove(2, 1, 4), RowMove(1, 0, 4)],
        [RowMove(2, 1, 4), RowMove(3, 1, 4)],
    ],
)
def test_rows_that_would_overwrite_one_another_are_refused(moves: list[RowMove]) -> None:
    with pytest.raises(HearthError, match="cannot be moved in this order"):
        moved(moves)


def test_settings_become_what_the_kernels_read() -> None:
    params = RequestOptions(temperature=1e-50, top_k=31, seed=(1 << 64) - 1, logprobs=0)
    row = np.array([row_settings(params, 31)], ROW)[0]
    assert row["temperature"] == np.finfo(np.float32).tiny
    assert (row["top_k"], row["logprobs"], row["flags"]) == (0, 0, 0)
    assert int(row["seed"]) == (1 << 64) - 1
    plain = RequestOptions(top_k=3, top_p=0.5, min_p=0.1, seed=9)
    assert is_greedy(row_settings(plain, 31))
    for other in (
        params,
        RequestOptions(logprobs=0),
        RequestOptions(presence_penalty=1),
        RequestOptions(logit_bias=((3, 1.0),)),
    ):
        assert not is_greedy(row_settings(other, 31))
    assert row_settings(RequestOptions(presence_penalty=1, logit_bias=((3, 1.0),)), 31)[-1] == 3
