import ctypes
from typing import Any

import pytest

from hearth.runtime.device.cuda.compiler import KernelCompiler, kernel_source, load_compiler_api
from hearth.runtime.device.cuda.programs import WantedKernels
from hearth.runtime.executor.kernels.step import ResidualStream, StreamArguments, StreamConfig


def test_a_thread_takes_eight_elements() -> None:
    wanted = WantedKernels()
    stream = ResidualStream(wanted, "bfloat16", 72)
    assert {(one.name, one.config) for one in wanted.requests} == {
        ("begin", StreamConfig(bfloat=True)),
        ("add", StreamConfig(bfloat=True)),
    }
    launch = stream.begin(1 << 40, 1 << 41, 33, (1 << 42, 216), (1 << 43, 384))
    # 33 * 9 pieces in blocks of 128.
    assert (launch.grid, launch.block, launch.shared_bytes) == ((3, 1, 1), 128, 0)
    assert fields(launch.arguments) == (1 << 40, 1 << 41, 1 << 42, 1 << 43, 297, 9, 27, 96)
    assert fields(stream.add(5, 6, 1).arguments) == (5, 6, 0, 0, 9, 9, 0, 0)
    assert ctypes.sizeof(StreamArguments) == 48


def fields(arguments: Any) -> tuple[int, ...]:
    return tuple(getattr(arguments, name) for name, _ in arguments._fields_)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize("bfloat", [False, True])
def test_the_source_compiles(tmp_path: Any, architecture: str, *, bfloat: bool) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", exc_type=ImportError)
    made = KernelCompiler(load_compiler_api(), architecture, tmp_path)
    source = kernel_source("decoder/enter", StreamConfig(bfloat=bfloat))
    assert made.compile("enter", source, ()).startswith(b"\x7fELF")
