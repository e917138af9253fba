"""Kernels compile, and their structures lie in ctypes as they do in CUDA: name, place and size."""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hearth.runtime.device.cuda.compiler import (
    KernelAttribute,
    KernelCompiler,
    KernelConfig,
    kernel_source,
    load_compiler_api,
)
from hearth.runtime.device.cuda.cuda_device import RotaryArguments
from hearth.runtime.device.cuda.ops import FeedArguments, FoundArguments, LengthsArguments
from hearth.runtime.device.cuda.sample_ring import RESULT
from hearth.runtime.device.cuda.sampler import BatchArguments, TokenMoves
from hearth.runtime.device.cuda.storage import Moves, PagesArguments, PathArguments, RowsArguments
from hearth.runtime.device.cuda.tree_ops import (
    ChainArguments,
    FinishArguments,
    NodesArguments,
    ProposalArguments,
)
from hearth.runtime.device.cuda.walks import WalkArguments
from hearth.runtime.device.cuda.wide_draws import ROW, WideArguments
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.kernels.adapters import AddedArguments, ShrinkArguments, ShrinkConfig
from hearth.runtime.executor.kernels.attention import (
    AttentionArguments,
    AttentionConfig,
    HeadConfig,
)
from hearth.runtime.executor.kernels.draft_step import (
    DraftConfig,
    FuseArguments,
    ScoresArguments,
    SelectArguments,
)
from hearth.runtime.executor.kernels.product_arguments import (
    Matrix,
    NormArguments,
    NormConfig,
    ProductArguments,
    ProductConfig,
)
from hearth.runtime.executor.kernels.product_tiles import WideTiles
from hearth.runtime.executor.kernels.products import TiledConfig
from hearth.runtime.executor.kernels.step import StreamArguments, StreamConfig

nvrtc = pytest.importorskip("cuda.bindings.nvrtc", exc_type=ImportError)
pytest.importorskip("cuda.bindings.nvrtc", exc_type=ImportError)

ARCHITECTURES = ["sm_87", "sm_120", "sm_90", "sm_110"]
KERNELS = [
    ("step/steps", ("-DINDEX=int", "-DUNIT=uint4")),
    ("step/steps", ("-DINDEX=long long", "-DUNIT=unsigned short")),
    ("step/steps", ("-DINDEX=int", "-DCONVERT", "-DTABLE=half_bits", "-DOUT=bfloat_bits")),
    ("step/steps", ("-DINDEX=long long", "-DCONVERT", "-DTABLE=float", "-DOUT=half_bits")),
    ("step/cache", ("-DINDEX=int", "-DUNIT=uint4")),
    ("step/cache", ("-DINDEX=long long", "-DUNIT=unsigned short")),
    ("sampling/sampling", ("-DINDEX=int", "--fmad=false")),
    ("sampling/sampling", ("-DINDEX=long long", "--fmad=false")),
    ("sampling/history", ()),
    ("tree/walk", ("-DINDEX=int", "--fmad=false")),
    ("tree/walk", ("-DINDEX=long long", "--fmad=false")),
    ("tree/tree", ("-DUNIT=uint4", "-DEACH=1")),
    ("tree/tree", ("-DUNIT=unsigned short", "-DEACH=19")),
    ("step/gather", ("-DUNIT=uint4",)),
    ("step/rotary", ()),
    ("tree/feed", ("-DINDEX=int", "-DUNIT=uint4")),
    ("tree/feed", ("-DINDEX=long long", "-DCONVERT", "-DTABLE=half_bits", "-DOUT=float")),
]
LONG = ("sampling/sampling", "tree/walk")
"""Nine tenths of the time, and no code for one architecture: a form is compiled for one alone."""
TINY = 'extern "C" __global__ void tiny(int* x) { *x = VALUE; }'


def compiler(folder: Path, architecture: str = "sm_90") -> KernelCompiler:
    return KernelCompiler(load_compiler_api(), architecture, folder)


def forms_for(architecture: str, known: frozenset[str]) -> list[tuple[str, tuple[str, ...]]]:
    """Kernels, in their forms by turns: types are C++, the same for every architecture."""
    served = [one for one in ARCHITECTURES if one in known]
    turn = served.index(architecture)
    chosen = []
    for name in dict(KERNELS):
        forms = [kernel for kernel in KERNELS if kernel[0] == name]
        own = forms[turn :: len(served)]
        chosen += own if own or name in LONG else [forms[turn % len(forms)]]
    return chosen


@pytest.mark.parametrize("known", [frozenset(ARCHITECTURES), frozenset({"sm_87", "sm_90"})])
def test_every_form_of_a_kernel_is_compiled_for_some_architecture(known: frozenset[str]) -> None:
    chosen = {one: forms_for(one, known) for one in known}
    assert {kernel for kernels in chosen.values() for kernel in kernels} == set(KERNELS)
    short = dict(KERNELS).keys() - set(LONG)
    assert all(short <= dict(kernels).keys() for kernels in chosen.values())


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_compiles_for(architecture: str, tmp_path: Path) -> None:
    made = compiler(tmp_path, architecture)
    if architecture not in made.architectures():
        pytest.skip(f"this NVRTC does not know {architecture}")

    def compiled(kernel: tuple[str, tuple[str, ...]]) -> bytes:
        name, options = kernel
        return made.compile(name, kernel_source(name), options)

    kernels = forms_for(architecture, made.architectures())
    with ThreadPoolExecutor() as threads:
        assert all(cubin.startswith(b"\x7fELF") for cubin in threads.map(compiled, kernels))


def test_a_gpu_that_is_newer_than_the_compiler_gets_ptx_of_the_highest_it_knows(
    tmp_path: Path,
) -> None:
    made = compiler(tmp_path, "sm_999")
    highest = max(int(one.removeprefix("sm_")) for one in made.architectures())
    code = made.compile("tiny", TINY, ("-DVALUE=1",))
    assert f".target sm_{highest}".encode() in code
    assert code.endswith(b"\0")
    assert compiler(tmp_path, "sm_999").compile("tiny", TINY, ("-DVALUE=1",)) == code


def test_a_gpu_that_the_compiler_no_longer_serves_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HearthError, match="the GPU is sm_20: install that of an earlier") as caught:
        compiler(tmp_path, "sm_20").compile("tiny", TINY, ("-DVALUE=1",))
    assert caught.value.code == "engine_incompatible"


@pytest.mark.parametrize(("bindings", "cuda"), [("12.9.4", "12.9"), ("13.5.0", "13")])
def test_a_missing_compiler_is_that_of_the_bindings(
    monkeypatch: pytest.MonkeyPatch, bindings: str, cuda: str
) -> None:
    def missing() -> None:
        raise RuntimeError("libnvrtc cannot be loaded")

    monkeypatch.setattr(nvrtc, "nvrtcVersion", missing)
    monkeypatch.setattr("hearth.runtime.device.cuda.compiler.version", lambda _: bindings)
    with pytest.raises(HearthError, match=rf"pip install 'cuda-bindings=={cuda}\.\*'"):
        load_compiler_api()


def test_a_kernel_is_compiled_once(tmp_path: Path) -> None:
    first, second = compiler(tmp_path), compiler(tmp_path)
    cubin = first.compile("tiny", TINY, ("-DVALUE=1",))
    assert second.compile("tiny", TINY, ("-DVALUE=1",)) == cubin
    assert (first.compiled, second.compiled) == (1, 0)
    assert second.compile("tiny", TINY, ("-DVALUE=2",)) != cubin
    assert compiler(tmp_path, "sm_87").compile("tiny", TINY, ("-DVALUE=1",)) != cubin


@pytest.mark.parametrize("damage", [b"", b"x" * 40, None])
def test_a_damaged_entry_is_built_again(tmp_path: Path, damage: bytes | None) -> None:
    cubin = compiler(tmp_path).compile("tiny", TINY, ("-DVALUE=1",))
    (entry,) = tmp_path.iterdir()
    whole = entry.read_bytes()
    entry.write_bytes(whole[:-1] if damage is None else damage)
    again = compiler(tmp_path)
    assert again.compile("tiny", TINY, ("-DVALUE=1",)) == cubin
    assert again.compiled == 1
    assert entry.read_bytes() == whole
    assert list(tmp_path.iterdir()) == [entry]


def test_a_folder_that_cannot_be_written_costs_only_time(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert compiler(blocked / "below").compile("tiny", TINY, ("-DVALUE=1",))


def test_a_wrong_source_is_reported_with_the_log(tmp_path: Path) -> None:
    with pytest.raises(HearthError, match=r'nvrtcCompileProgram.*(\n.*)*"VALUE" is undefined'):
        compiler(tmp_path).compile("tiny", TINY, ())
    assert not list(tmp_path.iterdir())


def test_headers_of_the_package_are_put_in() -> None:
    source = kernel_source("sampling/sampling")
    assert '#include "' not in source
    assert source.index("struct Row") < source.index("find_best") < source.index("pick_rows")


def test_headers_are_put_in_once_wherever_they_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "sources_of_a_test"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "one.cuh").write_text("int one;\n")
    (package / "two.cuh").write_text('#include "one.cuh"\nint two;\n')
    (package / "all.cu").write_text('#include "one.cuh"\n#include "two.cuh"\nint all;\n')
    monkeypatch.syspath_prepend(tmp_path)
    assert kernel_source("all", package=package.name) == "int one;\nint two;\nint all;\n"


TYPES = ("-DINDEX=long long", "-DUNIT=uint4", "-DHIDDEN=uint4", "-DEACH=1")
TILES = WideTiles(8, 16, 2, 8, 4, 2)
TILED = TiledConfig(
    ProductConfig(
        bfloat=False,
        inputs=1024,
        output=0,
        matrices=1,
        biased=False,
        added=True,
        weight_bits=16,
        scale_block=0,
        zeros=False,
    ),
    TILES,
    even=True,
    shared_bytes=TILES.shared_bytes,
    cluster_dims=KernelAttribute(),
)
HEADS = HeadConfig(bfloat=False, dim=128, rotary=128, query_heads=16, kv_heads=8, early=False)
LAYOUTS: dict[str, tuple[KernelConfig | None, dict[str, Any]]] = {
    "attention/attention": (AttentionConfig(HEADS, 4), {"Arguments": AttentionArguments}),
    "decoder/draft": (
        DraftConfig(bfloat=False),
        {"Fuse": FuseArguments, "Select": SelectArguments, "Scores": ScoresArguments},
    ),
    "decoder/enter": (StreamConfig(bfloat=False), {"Arguments": StreamArguments}),
    "gemm/normalise": (NormConfig(False, 1024, False), {"Arguments": NormArguments}),
    "gemm/tiled": (
        TILED,
        {"Arguments": ProductArguments, "Matrix": Matrix, "Added": AddedArguments},
    ),
    "lora/shrink": (ShrinkConfig(False, 1024), {"Shrink": ShrinkArguments}),
    "sampling/sampling": (
        None,
        {"Batch": BatchArguments, "Moves": TokenMoves, "Row": ROW, "Result": RESULT},
    ),
    "step/cache": (
        None,
        {"Rows": RowsArguments, "Moves": Moves, "Pages": PagesArguments, "Path": PathArguments},
    ),
    "step/rotary": (None, {"Rotary": RotaryArguments}),
    "step/steps": (
        None,
        {"Feed": FeedArguments, "Found": FoundArguments, "Lengths": LengthsArguments},
    ),
    "tree/chain": (None, {"Chain": ChainArguments}),
    "tree/feed": (None, {"Nodes": NodesArguments}),
    "tree/tree": (None, {"Proposal": ProposalArguments, "Finish": FinishArguments}),
    "tree/walk": (None, {"Walk": WalkArguments, "Wide": WideArguments}),
}


def places(kind: Any) -> dict[str, tuple[int, int]]:
    """Where each field of a structure or of a type of NumPy lies, and what it takes."""
    if not hasattr(kind, "_fields_"):
        return {name: (at, one.itemsize) for name, (one, at) in kind.fields.items()}
    fields = ((name, getattr(kind, name)) for name, *_ in kind._fields_)
    return {name: (one.offset, one.size) for name, one in fields}


def checks(name: str, kind: Any) -> str:
    """Assertions of C++ that a structure lies so."""
    size = ctypes.sizeof(kind) if hasattr(kind, "_fields_") else kind.itemsize
    lines = [f"static_assert(sizeof({name}) == {size});"]
    for field, (at, taken) in places(kind).items():
        if field == "unused":
            continue
        lines.append(f"static_assert(__builtin_offsetof({name}, {field}) == {at});")
        lines.append(f"static_assert(sizeof((({name}*)0)->{field}) == {taken});")
    return "\n".join(lines)


def log_of(source: str, types: tuple[str, ...] = ()) -> str:
    """What the compiler has to say of a source; nothing where it is right."""
    api: Any = load_compiler_api()
    _, program = api.nvrtcCreateProgram(source.encode(), b"layout.cu", 0, [], [])
    options = [
        option.encode()
        for option in ("--std=c++17", "-default-device", "-arch=compute_90", "-w", *types)
    ]
    (failed,) = api.nvrtcCompileProgram(program, len(options), options)
    _, size = api.nvrtcGetProgramLogSize(program)
    log = bytearray(size)
    api.nvrtcGetProgramLog(program, log)
    return log.decode() if failed else ""


@pytest.mark.parametrize("file", LAYOUTS)
def test_arguments_lie_as_their_kernel_reads_them(file: str) -> None:
    config, kinds = LAYOUTS[file]
    asserted = "\n".join(checks(name, kind) for name, kind in kinds.items())
    types = TYPES if config is None else ()
    assert not log_of(f"{kernel_source(file, config)}\n{asserted}\n", types)


def test_the_check_itself_finds_fields_that_changed_places() -> None:
    class Turned(ctypes.Structure):
        _fields_ = NormArguments._fields_[1::-1] + NormArguments._fields_[2:]

    source = kernel_source("gemm/normalise", NormConfig(False, 1024, False))
    assert "static assertion failed" in log_of(f"{source}\n{checks('Arguments', Turned)}\n")
