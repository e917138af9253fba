import hashlib
import re
from collections.abc import Sequence
from contextlib import suppress
from importlib import resources
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from hearth.runtime.errors import HearthError
from hearth.runtime.packages import Need, pip_install

CSRC = "hearth.runtime.csrc"
"""The package with the sources of all kernels."""
_DIGEST_BYTES = 32
# With the instructions that no later GPU has (those of four warps together).
_WHOLE = {"sm_90": "sm_90a"}
_HEADER = re.compile(r'^#include "([\w/]+\.cuh)"\n', re.MULTILINE)


class KernelAttribute(str):
    """Attribute of a kernel's declaration, set by the preprocessor alone."""

    __slots__ = ()


class KernelConfig(Protocol):
    """Constants that a kernel is compiled for: a named tuple of numbers and nested named tuples."""

    def _asdict(self) -> dict[str, Any]:
        """Return the fields by name."""


def config_source(config: KernelConfig) -> str:
    """`struct Config` of a kernel: the fields of its configuration as constants, in capitals."""
    fields = config_fields(config)
    lines = ["struct Config {", *(_constant(name, value) for name, value in fields.items()), "};"]
    for name, value in fields.items():
        if isinstance(value, KernelAttribute):
            lines.append(f"#define {name.upper()} {value}")
    return "".join(f"{line}\n" for line in lines if line)


def config_fields(config: KernelConfig) -> dict[str, Any]:
    """The fields of a configuration and of the tuples in it, by name."""
    found: dict[str, Any] = {}
    for name, value in config._asdict().items():
        found |= config_fields(value) if hasattr(value, "_asdict") else {name: value}
    return found


def _constant(name: str, value: bool | int | KernelAttribute) -> str:  # noqa: FBT001 (as it is stored)
    if isinstance(value, KernelAttribute):
        return ""
    if isinstance(value, bool):
        return f"  static constexpr bool {name.upper()} = {str(value).lower()};"
    return f"  static constexpr int {name.upper()} = {value};"


def kernel_source(name: str, config: KernelConfig | None = None, package: str = CSRC) -> str:
    """The CUDA C++ source `name` of a package behind its `Config`, each header put in once."""
    known: set[str] = set()

    def read(file: str) -> str:
        if file in known:
            return ""
        known.add(file)
        text = resources.files(package).joinpath(file).read_text("utf-8")
        return _HEADER.sub(lambda found: read(found[1]), text)

    return ("" if config is None else config_source(config)) + read(f"{name}.cu")


def load_compiler_api() -> Any:
    """The module `cuda.bindings.nvrtc`; raises `engine_incompatible` if it is missing."""
    try:
        from cuda.bindings import nvrtc  # noqa: PLC0415 (a CPU has no need of it)

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise HearthError(
            "engine_incompatible",
            f"CUDA kernels cannot be compiled ({error}): {pip_install(_of_bindings())}",
            "device",
        ) from error
    return nvrtc


def compiler_version(api: Any) -> str:
    """Major and minor version of NVRTC, that of its CUDA; raises `engine_incompatible`."""
    status, major, minor = api.nvrtcVersion()
    if status:
        raise HearthError("engine_incompatible", "this NVRTC does not say its version", "device")
    return f"{major}.{minor}"


def _of_bindings() -> Need:
    """Return the extra that installs a compiler for the CUDA of the installed bindings."""
    try:
        major = version("cuda-bindings").partition(".")[0]
    except PackageNotFoundError:
        major = "13"
    return "cuda12" if major == "12" else "cuda13"


class KernelCompiler:
    """NVRTC for one architecture such as `sm_90`, with a cache of cubins on disk.

    For a GPU that is newer than this NVRTC it makes PTX, which the driver compiles. The name of a
    cache entry is the digest of everything that it depends on, and the entry begins with the digest
    of its own bytes; an entry that does not agree with it is compiled again.
    """

    def __init__(self, api: Any, architecture: str, folder: Path) -> None:
        self._api = api
        self._architecture = architecture
        self._folder = folder
        self.compiled = 0
        """Number of kernels that were not found in the cache."""

    def architectures(self) -> frozenset[str]:
        """The architectures that this NVRTC knows."""
        known = self._check("nvrtcGetSupportedArchs", None, *self._api.nvrtcGetSupportedArchs())
        return frozenset(f"sm_{number}" for number in known)

    def compile(self, name: str, source: str, options: Sequence[str]) -> bytes:
        """The cubin of `source`; raises `internal` with the compiler's log when it is wrong.

        Raises `engine_incompatible` for a GPU older than every GPU that this NVRTC knows.
        """
        options = self._options(options)
        path = self._path(name, source, options)
        cubin = read_entry(path)
        if cubin is None:
            cubin = self._compile(name, source, options)
            self.compiled += 1
            write_entry(path, cubin)
        return cubin

    def has(self, name: str, source: str, options: Sequence[str]) -> bool:
        """Return True if the cache has a file for the kernel, damaged or not."""
        return self._path(name, source, self._options(options)).exists()

    def _options(self, options: Sequence[str]) -> tuple[str, ...]:
        return ("--std=c++17", "-default-device", f"-arch={self._target()}", *options)

    def _path(self, name: str, source: str, options: Sequence[str]) -> Path:
        stem = name.rpartition("/")[2]
        return self._folder / f"{stem}-{self._key(source, options)}.cubin"

    def _target(self) -> str:
        known = self.architectures()
        if self._architecture in known:
            return _WHOLE.get(self._architecture, self._architecture)
        wanted = int(self._architecture.removeprefix("sm_"))
        numbers = [int(one.removeprefix("sm_")) for one in known]
        older = [number for number in numbers if number < wanted]
        if not older:
            raise HearthError(
                "engine_incompatible",
                f"this NVRTC compiles from sm_{min(numbers)} on, the GPU is {self._architecture}: "
                "install that of an earlier CUDA",
                "device",
            )
        return f"compute_{max(older)}"

    def _key(self, source: str, options: Sequence[str]) -> str:
        parts = (compiler_version(self._api), *options, source)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:_DIGEST_BYTES]

    def _compile(self, name: str, source: str, options: Sequence[str]) -> bytes:
        api = self._api
        created = api.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), 0, [], [])
        program = self._check("nvrtcCreateProgram", None, *created)
        try:
            arguments = [option.encode() for option in options]
            outcome = api.nvrtcCompileProgram(program, len(arguments), arguments)
            self._check("nvrtcCompileProgram", program, *outcome)
            # A virtual architecture has no cubin.
            call = "nvrtcGetPTX" if any("=compute_" in one for one in options) else "nvrtcGetCUBIN"
            size = self._check(call, None, *getattr(api, f"{call}Size")(program))
            code = bytearray(size)
            self._check(call, None, *getattr(api, call)(program, code))
            return bytes(code)
        finally:
            api.nvrtcDestroyProgram(program)

    def _check(self, call: str, program: Any, status: Any, *values: Any) -> Any:
        if not status:
            return values[0] if len(values) == 1 else values
        _, text = self._api.nvrtcGetErrorString(status)
        log = "" if program is None else f"\n{self._log(program)}"
        raise HearthError("internal", f"{call} failed: {text.decode()}{log}")

    def _log(self, program: Any) -> str:
        _, size = self._api.nvrtcGetProgramLogSize(program)
        log = bytearray(size)
        self._api.nvrtcGetProgramLog(program, log)
        return log.rstrip(b"\0\n").decode(errors="replace")


def read_entry(path: Path) -> bytes | None:
    """Read an entry of `write_entry`; None if it is missing or damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, cubin = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    return cubin if hashlib.sha256(cubin).digest() == digest else None


def write_entry(path: Path, cubin: bytes) -> None:
    """Put an entry in its place whole; a folder that cannot be written costs only time."""
    part = path.with_name(f"{path.name}.{uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(hashlib.sha256(cubin).digest() + cubin)
        part.replace(path)
    except OSError:
        with suppress(OSError):
            part.unlink()
