"""Build hearth_msgs for the ROS 2 of this Python's environment from wheels, without colcon.

`python build_hearth_msgs.py OUT` leaves libraries in OUT/lib, for LD_LIBRARY_PATH, and the package
in OUT/python, for PYTHONPATH. It needs gcc, and in the environment catkin_pkg.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

PACKAGE = "hearth_msgs"
DEFINITIONS = Path(__file__).parents[1] / PACKAGE
_ENVIRONMENT = Path(sys.prefix)
# Packages whose types are parts of ours.
_NEEDED = (
    "action_msgs",
    "builtin_interfaces",
    "sensor_msgs",
    "service_msgs",
    "std_msgs",
    "unique_identifier_msgs",
)
_KINDS = ("fastrtps_c", "introspection_c")


def build(out: Path) -> None:
    """Build into `out`, unless what lies there is of the same definitions."""
    definitions = sorted(path for path in DEFINITIONS.rglob("*.*") if path.parent != DEFINITIONS)
    digest = hashlib.sha256(b"".join(p.read_bytes() for p in [Path(__file__), *definitions]))
    mark = out / "digest"
    if mark.is_file() and mark.read_text() == digest.hexdigest():
        return
    shutil.rmtree(out, ignore_errors=True)
    (out / "lib").mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        _generate(Path(folder), [path.relative_to(DEFINITIONS) for path in definitions])
        _compile(Path(folder), out)
    mark.write_text(digest.hexdigest())


def _generate(folder: Path, definitions: Iterable[Path]) -> None:
    # The wheels name each generator twice, which the command takes for a conflict.
    for doubled in Path(sysconfig.get_path("purelib")).glob("rosidl_*.egg-info"):
        shutil.rmtree(doubled)
    command = [_ENVIRONMENT / "bin" / "rosidl", "generate", "-o", folder]
    command += ["-I", _ENVIRONMENT / "share", "-t", "c", "-t", "py", "-ts", "c"]
    for kind in _KINDS:
        command += ["-ts", kind]
    environ = {**os.environ, "AMENT_PREFIX_PATH": str(_ENVIRONMENT)}
    _run([*command, PACKAGE, *definitions], DEFINITIONS, environ)


def _compile(folder: Path, out: Path) -> None:
    lib, python = out / "lib", out / "python" / PACKAGE
    include = folder / "include"
    for kind in ("c", *_KINDS):
        shutil.copytree(folder / kind, include / PACKAGE, dirs_exist_ok=True)
    shutil.copytree(folder / "py", python, ignore=shutil.ignore_patterns("*.c", "tmp"))
    (python / "__init__.py").touch()

    def library(kind: str, sources: Iterable[Path], *needs: str) -> None:
        needed = [f"-l{PACKAGE}__{name}" for name in needs]
        needed += [f"-l{package}__{kind}" for package in _NEEDED]
        _link(lib / f"lib{PACKAGE}__{kind}.so", sources, include, lib, needed)

    library("rosidl_generator_c", (folder / "c").glob("*/detail/*.c"))
    for kind in _KINDS:
        language = "c" if kind == "introspection_c" else "cpp"
        sources = (folder / kind).glob(f"*/detail/*__type_support*.{language}")
        library(f"rosidl_typesupport_{kind}", sources, "rosidl_generator_c")
    library("rosidl_typesupport_c", (folder / "c").glob("*/*.cpp"), "rosidl_generator_c")
    library("rosidl_generator_py", (folder / "py").glob("*/*_s.c"), "rosidl_generator_c")
    _link(
        python / f"{PACKAGE}_s__rosidl_typesupport_c{sysconfig.get_config_var('EXT_SUFFIX')}",
        [folder / "py" / f"_{PACKAGE}_s.ep.rosidl_typesupport_c.c"],
        include,
        lib,
        [f"-l{PACKAGE}__{n}" for n in ("rosidl_generator_py", "rosidl_typesupport_c")],
    )


def _link(
    target: Path, sources: Iterable[Path], include: Path, lib: Path, libraries: Sequence[str]
) -> None:
    headers = [include, _ENVIRONMENT / "include", *(_ENVIRONMENT / "include").iterdir()]
    headers += [Path(np.get_include()), Path(sysconfig.get_path("include"))]
    common = [f"-l{n}" for n in ("rosidl_runtime_c", "rosidl_typesupport_c", "fastcdr")]
    common += [f"-lrosidl_typesupport_{kind}" for kind in _KINDS]
    # Loading a library has to load those of its parts as well, which no symbol of its own names.
    places = [f"-L{lib}", f"-L{_ENVIRONMENT / 'lib'}", "-Wl,--no-as-needed"]
    flags = [*(f"-I{path}" for path in headers), *places]
    command = ["g++", "-shared", "-fPIC", "-O0", "-w", "-o", target]
    objects = []
    for source in sorted(sources):
        compiler = "gcc" if source.suffix == ".c" else "g++"
        objects.append(source.with_name(f"{source.parent.parent.name}_{source.stem}.o"))
        _run([compiler, "-c", "-fPIC", "-O0", "-w", *flags, source, "-o", objects[-1]])
    _run([*command, *objects, *flags, *libraries, *common])


def _run(
    command: Sequence[str | Path], folder: Path | None = None, environ: dict[str, str] | None = None
) -> None:
    ran = subprocess.run(  # noqa: S603 - our own arguments
        [str(part) for part in command],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if ran.returncode:
        sys.exit(f"{Path(command[0]).name} failed:\n{ran.stdout}{ran.stderr}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    build(parser.parse_args().out)
