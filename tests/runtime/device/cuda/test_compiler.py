from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hearth.runtime.device.cuda.compiler import KernelCompiler, kernel_source, load_compiler_api
from hearth.runtime.errors import HearthError

nvrtc = pytest.importorskip("cuda.bindings.nvrtc", exc_type=ImportError)
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
