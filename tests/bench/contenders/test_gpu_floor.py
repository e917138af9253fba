"""The ways of reading of a GPU's floor: compiled here, tried where there is a GPU."""

import time

import pytest

from hearth.bench.contenders.contender import Job
from hearth.bench.contenders.gpu_floor import BLOCK, PIECE, SHAPES, SHARES, GPUFloor
from hearth.runtime.device.cuda.compiler import kernel_source, load_compiler_api

MIB = 1 << 20


def test_tiles_divide_every_buffer() -> None:
    for shape in SHAPES:
        assert 32 * MIB % (max(SHARES) * PIECE * BLOCK * shape.unroll) == 0


@pytest.mark.parametrize("architecture", ["sm_87", "sm_90", "sm_120"])
def test_all_loads_of_a_thread_are_under_way_at_once(architecture: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", exc_type=ImportError)
    api = load_compiler_api()
    source = kernel_source("read", package="hearth.bench.contenders").encode()
    for shape in SHAPES:
        _, program = api.nvrtcCreateProgram(source, b"read.cu", 0, [], [])
        macros = [
            f"-DBLOCK={BLOCK}",
            f"-DUNROLL={shape.unroll}",
            f"-arch=compute_{architecture[3:]}",
        ]
        (status,) = api.nvrtcCompileProgram(program, 3, [macro.encode() for macro in macros])
        assert not status
        _, size = api.nvrtcGetPTXSize(program)
        code = bytearray(size)
        api.nvrtcGetPTX(program, code)
        loads = code.decode().count("ld.global.nc.L1::no_allocate.v4.u32")
        assert loads == shape.unroll


@pytest.mark.reference
def test_pytorch_reads_where_there_is_no_gpu() -> None:
    pytest.importorskip("torch")
    floor = GPUFloor(Job(contender="gpu_floor", bytes=32 * MIB))
    assert (floor.count, floor.prefill(), floor.step(), floor.step()) == (2, 0, 0, 0)
    floor.close()


@pytest.mark.gpu
def test_no_way_reads_faster_than_memory_can() -> None:
    size = 4 << 30
    floor = GPUFloor(Job(contender="gpu_floor", bytes=size, device="cuda"))
    assert floor.count >= len(SHAPES) * len(SHARES)
    for _ in range(floor.count):
        floor.step()
        began = time.perf_counter()
        floor.step()
        assert 1e9 < size / (time.perf_counter() - began) < 20e12
    floor.close()
