"""`python -m tests.runtime.executor.kernels.ptxas`: registers and spills of hot kernels.

What ptxas says of them is compared with `ptxas.json`, and each difference is told; the exit code is
1 where there is one. `--record` writes the file anew. No GPU is needed: NVRTC compiles for all.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hearth.daemon.kernel_cache import targets_of
from hearth.runtime.device.cuda.compiler import (
    KernelConfig,
    compiler_version,
    kernel_source,
    load_compiler_api,
)
from hearth.runtime.device.cuda.gpu_facts import GpuFacts
from hearth.runtime.device.cuda.programs import KernelRequest
from hearth.runtime.executor.engine import IOTensor
from hearth.runtime.executor.kernels.engine import compiler_threads, io_tensors_of
from hearth.runtime.executor.kernels.step import DecoderStep, step_shape
from hearth.runtime.tensors.profiles import InferenceDims
from tests.runtime.executor.kernels.kernel_engines import (
    bindings_of,
    kernels_config,
    layout_of,
    registry_of,
)

RECORD = Path(__file__).with_name("ptxas.json")
TARGETS = {
    "sm_87": "8.7:8",
    "sm_89": "8.9:128",
    "sm_90a": "9.0:132",
    "sm_110": "11.0:20",
    "sm_120": "12.0:170",
}
"""The smallest Orin, an RTX 4090, an H200, Thor and an RTX 5090."""
SHAPES = {
    "0.6b": {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 3072},
    "4b": {"hidden_size": 2560, "num_attention_heads": 32, "intermediate_size": 9728},
    "8b": {"hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 12288},
}
"""Those of Qwen3."""
SLOTS, BLOCK = 4096, 32
_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


class Use(NamedTuple):
    """What a kernel takes: registers of a thread, and bytes that it stores and loads for more."""

    registers: int
    stored: int
    loaded: int


class _Requests:
    """Hands out requests in place of kernels, so that a launch tells what it would be."""

    def kernel(
        self, file: str, name: str, config: KernelConfig, shared_bytes: int = 0
    ) -> KernelRequest:
        return KernelRequest(file, name, config, shared_bytes)


def ptxas_log(architecture: str, file: str, config: KernelConfig) -> str:
    """What ptxas says of a source of kernels with this configuration."""
    api: Any = load_compiler_api()
    source = kernel_source(file, config).encode()
    _, program = api.nvrtcCreateProgram(source, f"{file}.cu".encode(), 0, [], [])
    fixed = ("--std=c++17", "-default-device", f"-arch={architecture}", "--ptxas-options=-v")
    arguments = [option.encode() for option in fixed]
    (failed,) = api.nvrtcCompileProgram(program, len(arguments), arguments)
    _, size = api.nvrtcGetProgramLogSize(program)
    log = bytearray(size)
    api.nvrtcGetProgramLog(program, log)
    api.nvrtcDestroyProgram(program)
    text = log.decode(errors="replace")
    assert not failed, text
    return text


def used(log: str) -> dict[str, Use]:
    """What each kernel of a program takes, by the log of ptxas."""
    found = {}
    for part in re.split(r"(?=Compiling entry function)", log):
        entry, spills, registers = (one.search(part) for one in (_ENTRY, _SPILLS, _REGISTERS))
        if entry and spills and registers:
            found[entry[1]] = Use(int(registers[1]), int(spills[1]), int(spills[2]))
    return found


def differences(recorded: Mapping[str, list[int]], now: Mapping[str, list[int]]) -> list[str]:
    """A line for each kernel that takes something else than what was recorded."""
    found = []
    for name in sorted(recorded.keys() | now.keys()):
        if name not in now:
            found.append(f"{name}: is no more")
        elif name not in recorded:
            found.append(f"{name}: is new, {_words(now[name])}")
        elif recorded[name] != now[name]:
            found.append(f"{name}: {_words(now[name])}, recorded {_words(recorded[name])}")
    return found


def _words(use: Iterable[int]) -> str:
    registers, stored, loaded = use
    spilled = f"spills {stored} and reads {loaded} bytes" if stored or loaded else "spills nothing"
    return f"{registers} registers, {spilled}"


def hot_kernels(facts: GpuFacts, shape: str, kind: str) -> dict[str, KernelRequest]:
    """Kernels of a decode step of one row, by the launch that they are; weights are of `kind`."""
    config = kernels_config(
        **SHAPES[shape],
        num_decoder_layers=1,
        num_attention_layers=1,
        num_kv_heads=8,
        head_dim=128,
        rotary_dim=128,
        vocab_size=151_936,
        output_vocab_size=151_936,
        max_kv_cache_capacity=SLOTS,
        weight_quantization="none" if kind == "float16" else kind,
        weight_block_size=0 if kind == "float16" else BLOCK,
    )
    # What is quantised has a head of its own.
    layout = layout_of(config, tied=kind == "float16")
    registry = registry_of(config, layout)
    io = io_tensors_of(config, registry)
    if kind != "float16":
        io = tuple(_in_integers(io))
    bindings = bindings_of(io, registry, InferenceDims.decode(1, SLOTS))
    step = DecoderStep(config, layout, io, _Requests(), facts)
    step.provide([step_shape({one.name: one.shape for one in bindings})])
    found: dict[str, KernelRequest] = {}
    for launch in step.launches(bindings):
        name = launch.name
        if name == "residual":
            name = "down" if "output" in found else "output"
        found[name] = launch.function
    return found


def _in_integers(io: Iterable[IOTensor]) -> Iterator[IOTensor]:
    """The bindings with matrices of four bits, two in a byte, and their scales."""
    for one in io:
        if not (one.name == "head" or re.fullmatch(r"layers\.0\.(q|k|v|o|gate|up|down)", one.name)):
            yield one
            continue
        rows, inputs = (int(size or 0) for size in one.shape)
        yield IOTensor(one.name, "input", np.dtype(np.uint8), (rows, inputs // 2))
        yield IOTensor(f"{one.name}.scale", "input", one.dtype, (rows, inputs // BLOCK))


def measured(targets: Iterable[str]) -> dict[str, list[int]]:
    """What every hot kernel takes, by target, shape, weights and launch."""
    requests = {
        (target, f"{target}/{shape}/{kind}/{name}"): request
        for target in targets
        for shape in SHAPES
        for kind in ("float16", "int4")
        for name, request in hot_kernels(facts_of(target), shape, kind).items()
    }
    programs = dict.fromkeys(
        (target, one.file, one.config) for (target, _), one in requests.items()
    )
    with ThreadPoolExecutor(compiler_threads()) as pool:
        logs = pool.map(lambda one: used(ptxas_log(*one)), programs)
        found = dict(zip(programs, logs, strict=True))
    return {
        name: list(found[target, one.file, one.config][one.name])
        for (target, name), one in requests.items()
    }


def facts_of(target: str) -> GpuFacts:
    """What is known of a target."""
    (one,) = targets_of(TARGETS[target])
    return one.facts


def main() -> int:
    """Compare, or record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="write what is found")
    parser.add_argument(
        "--target", action="append", choices=TARGETS, help="only this; several may be"
    )
    chosen = parser.parse_args()
    targets = chosen.target or list(TARGETS)
    version, now = compiler_version(load_compiler_api()), measured(targets)
    recorded = json.loads(RECORD.read_text("utf-8")) if RECORD.exists() else {"kernels": {}}
    of_targets = {
        name: use for name, use in recorded["kernels"].items() if name.split("/")[0] in targets
    }
    if chosen.record:
        others = {name: use for name, use in recorded["kernels"].items() if name not in of_targets}
        _write({"nvrtc": version, "kernels": dict(sorted((others | now).items()))})
        return 0
    found = differences(of_targets, now)
    sys.stdout.write("".join(f"{line}\n" for line in found))
    if found and recorded["nvrtc"] != version:
        sys.stdout.write(f"recorded with NVRTC {recorded['nvrtc']}, this is {version}\n")
    sys.stdout.write(f"{len(now)} kernels, {len(found)} differences\n")
    return 1 if found else 0


def _write(record: object) -> None:
    """A line for each kernel."""
    text = json.dumps(record, indent=1)
    RECORD.write_text(re.sub(r"\[\s+(\d+),\s+(\d+),\s+(\d+)\s+\]", r"[\1, \2, \3]", text) + "\n")


if __name__ == "__main__":
    sys.exit(main())
