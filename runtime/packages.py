"""The packages of others that Hearth's extras bring, and commands that install them.

`hearthd` itself is on no registry: a command that named it there would install a stranger's.
"""

import re
import shlex
import sys
from typing import Literal

VERSION = "0.3.0"


def version_numbers(text: str) -> tuple[int, ...]:
    """Up to three numbers of a version: (10, 0, 0) of "10.0.0b6"; more count packages of it."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])


Need = Literal[
    "onnxruntime",
    "onnxruntime-gpu",
    "cuda12",
    "cuda13",
    "tensorrt_rtx",
    "tensorrt_lean",
    "grammar",
    "traces",
]
_PACKAGES: dict[Need, tuple[str, ...]] = {
    "onnxruntime": ("onnxruntime>=1.23",),
    "onnxruntime-gpu": ("onnxruntime-gpu>=1.30",),
    "cuda12": ("cuda-bindings==12.9.*", "nvidia-cuda-nvrtc-cu12==12.9.*"),
    "cuda13": ("cuda-bindings==13.*", "nvidia-cuda-nvrtc==13.*"),
    "tensorrt_rtx": ("tensorrt-rtx-cu13-bindings>=1.7", "tensorrt-rtx-cu13-libs>=1.7"),
    "tensorrt_lean": ("tensorrt-lean-cu13-bindings==10.16.*", "tensorrt-lean-cu13-libs==10.16.*"),
    "grammar": ("llguidance>=1.9,<2",),
    "traces": ("opentelemetry-exporter-otlp-proto-http>=1.25", "opentelemetry-sdk>=1.25"),
}
WHEELS = (f"hearthd-{VERSION}-py3-none-any.whl", f"hearth_client-{VERSION}-py3-none-any.whl")
"""Wheels that `make release` puts into `dist`: the daemon's and the client's."""


def pip_install(need: Need, *options: str) -> str:
    """The command that installs what is missing into the environment that runs."""
    return f"{_pip('install')} {shlex.join([*options, *_PACKAGES[need]])}"


def pip_uninstall(package: str) -> str:
    """The command that takes a package from the environment that runs."""
    return f"{_pip('uninstall')} {package}"


def install_wheels(pip: str, extra: str) -> str:
    """The command by which `pip` installs Hearth from the folder `dist` of its wheels."""
    daemon, client = WHEELS
    return f"{pip} install 'dist/{daemon}[{extra}]' dist/{client}"


def _pip(verb: str) -> str:
    return f"{shlex.quote(sys.executable or 'python3')} -m pip {verb}"
