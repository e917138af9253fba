import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from hearth.bench.contenders.contender import (
    PACKAGES,
    ContenderName,
    Job,
    missing,
    open_contender,
)
from hearth.bench.contenders.floor import KERNELS, MemoryFloor, plain_passes, repeats
from hearth.bench.contenders.gpu_floor import BLOCK, PIECE, SHAPES, SHARES, GPUFloor
from hearth.bench.contenders.hearth_model import HearthModel
from hearth.bench.contenders.worker import Worker
from hearth.runtime.device.cuda.compiler import kernel_source, load_compiler_api
from hearth.runtime.errors import HearthError
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.options import RuntimeOptions
from hearth.runtime.request import GenerationRequest, RequestOptions, RowRequest


@pytest.mark.parametrize(
    ("contender", "module", "library"),
    [
        ("transformers", "torch_models", "torch"),
        ("llama_cpp", "llama_cpp_model", "llama_cpp"),
    ],
)
def test_a_missing_library_is_named(
    contender: ContenderName, module: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, f"hearth.bench.contenders.{module}", raising=False)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(HearthError, match=f"{PACKAGES[library]} is not installed") as caught:
        open_contender(Job(contender=contender))
    assert (caught.value.code, caught.value.field) == ("unsupported_option", "case")


def test_the_floor_needs_no_library() -> None:
    model = open_contender(Job(contender="floor", bytes=1 << 20, threads=2))
    assert isinstance(model, MemoryFloor)
    assert (model.prefill(), model.step(), model.precision) == (0, 0, "")
    model.close()


def test_only_an_engine_has_launches_of_its_own() -> None:
    model = open_contender(Job(contender="floor", bytes=1 << 20))
    with pytest.raises(HearthError, match="no launches"):
        model.launch(2)
    model.close()


@pytest.mark.parametrize(("size", "threads"), [(1 << 20, 1), (1 << 20, 3), (1 << 17, 2)])
def test_the_threads_share_the_whole_buffer(size: int, threads: int) -> None:
    reader = MemoryFloor(Job(contender="floor", bytes=size, threads=threads))
    reader.step()
    reader.close()
    assert len(reader._parts) == threads
    total = sum(part.nbytes for part in reader._parts)
    assert total >= size
    assert total - size <= threads * 4 * 4096


def test_every_pass_reads_with_the_other_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(
        "hearth.bench.contenders.floor.KERNELS",
        (lambda _: seen.append("a"), lambda _: seen.append("b")),
    )
    reader = MemoryFloor(Job(contender="floor", bytes=1 << 28))
    for _ in range(3):
        reader.step()
    reader.close()
    assert seen == ["a", "b", "a"]


def test_kernels_touch_every_value() -> None:
    part = np.ones((8, 16), np.float32)
    for kernel in KERNELS[:2]:
        assert float(np.asarray(kernel(part)).sum()) == part.size
    part[-1, -1] = 2
    assert KERNELS[2](part) == 2


def test_plain_passes_are_those_of_the_last_kernel() -> None:
    assert plain_passes([1, 2, 3, 4, 5, 6, 7]) == [3, 6]


def test_small_buffers_are_read_often() -> None:
    assert repeats(1 << 20) == 256
    assert repeats(1 << 28) == repeats(1 << 31) == 1


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


PROMPT = [5, 77, 200, 31]


def job(engine: Path, steps: int, *, spin: bool | None = None) -> Job:
    return Job(
        contender="hearth", path=str(engine), threads=1, prompt=PROMPT, steps=steps, spin=spin
    )


def test_its_steps_are_those_of_a_whole_request(toy: Path) -> None:
    model = HearthModel(job(toy, 10))
    stepped = [model.prefill(), *(model.step() for _ in range(10))]
    runtime = LLMInferenceRuntime.open(toy, RuntimeOptions(threads=1))
    row = RowRequest(
        token_ids=list(PROMPT),
        prompt_length=4,
        options=RequestOptions(max_tokens=11, ignore_eos=True),
    )
    assert stepped == runtime.handle_request(GenerationRequest(rows=[row])).rows[0].token_ids
    runtime.close()


@pytest.mark.parametrize("spin", [None, True, False])
def test_spinning_follows_the_job(
    toy: Path,
    spin: bool | None,  # noqa: FBT001 - a parameter of the test
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[bool] = []
    opened = LLMInferenceRuntime.open

    def spy(folder: Path, options: RuntimeOptions) -> LLMInferenceRuntime:
        seen.append(options.spin)
        return opened(folder, options)

    monkeypatch.setattr("hearth.bench.contenders.hearth_model.LLMInferenceRuntime.open", spy)
    HearthModel(job(toy, 1, spin=spin))
    assert seen == [RuntimeOptions().spin if spin is None else spin]


def test_more_steps_than_the_capacity_are_refused(toy: Path) -> None:
    with pytest.raises(HearthError) as caught:
        HearthModel(job(toy, 5000)).prefill()
    assert caught.value.code == "capacity_exceeded"


def test_rows_of_a_batch_step_together_from_a_captured_graph(toy: Path) -> None:
    batch = structs.replace(job(toy, 5), batch=3, capture=True)
    model = HearthModel(batch)
    alone = HearthModel(job(toy, 5))
    assert [model.prefill(), *(model.step() for _ in range(5))] == [
        alone.prefill(),
        *(alone.step() for _ in range(5)),
    ]
    assert model._runtime.counters.hits == 5


def test_raw_launches_change_nothing(toy: Path) -> None:
    model, other = (HearthModel(structs.replace(job(toy, 6), capture=True)) for _ in "ab")
    assert model.prefill() == other.prefill()
    first = [model.step() for _ in range(3)]
    hits = model._runtime.counters.hits
    assert model.launch(10) > 0
    assert model._runtime.counters.hits == hits + 10
    assert first + [model.step() for _ in range(3)] == [other.step() for _ in range(6)]


def test_raw_launches_find_rows_that_go_on(toy: Path) -> None:
    model = HearthModel(job(toy, 6))
    model.prefill()
    for _ in range(6):
        model.step()
    assert model._runtime.active
    assert max(model._runtime._runner.get_kv_cache().row_lengths) >= len(PROMPT) + 6
    assert model.launch(2) > 0
    model.close()


def test_the_floor_is_stepped_in_a_process_of_its_own(tmp_path: Path) -> None:
    job = Job(contender="floor", threads=2, bytes=1 << 22)
    with closing(Worker(job, tmp_path / "log").ready()) as floor:
        seconds = floor.advance(3)
    assert len(seconds) == 3
    assert min(seconds) > 0
    assert len(floor.tokens) == 4


def test_one_line_names_all_packages_that_are_missing() -> None:
    assert missing(["torch", "llama_cpp", "gguf"]) == (
        "torch, llama-cpp-python, gguf are not installed: make bench-env, or pip install "
        "torch llama-cpp-python gguf"
    )


def test_an_engine_folder_that_cannot_be_served_says_why(tmp_path: Path) -> None:
    job = Job(contender="hearth", path=str(tmp_path / "nothing"), prompt=[1], steps=1)
    with pytest.raises(HearthError) as caught:
        Worker(job, tmp_path / "log").ready()
    assert caught.value.code == "engine_missing"


def test_a_pause_is_not_timed(toy: Path, tmp_path: Path) -> None:
    job = Job(contender="hearth", path=str(toy), prompt=[5, 6], steps=6, capture=True)
    with closing(Worker(job, tmp_path / "log").ready()) as hearth:
        started = time.monotonic()
        seconds = hearth.advance(3, pause_s=0.2)
        assert time.monotonic() - started > 0.6
        # A machine that stalls may lengthen one of them, not all.
        assert min(seconds) < 0.2
        raw = hearth.advance(20, raw=True)
    assert len(raw) == 1
    assert raw[0] > 0


def test_an_import_error_of_our_own_is_not_taken_for_a_missing_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "hearth.bench.contenders.floor", None)
    with pytest.raises(ImportError):
        open_contender(Job(contender="floor"))
