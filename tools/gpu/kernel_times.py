"""`python -m tools.gpu.kernel_times [0.6b|4b ...]`: what steps of the engine of kernels take.

Weights are random and alike in every layer; each layer has its own copy. With `--profile` one
step of each kind is run plainly between cuProfilerStart and cuProfilerStop, for ncu, by a model of
three layers (`python -m tools.gpu.kernel_profile`).
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from hearth.runtime.device.cuda.cuda_device import CudaDevice, open_cuda_device
from hearth.runtime.export.weights import Kind
from hearth.runtime.tensors.profiles import InferenceDims
from hearth.runtime.tensors.tensor import numpy_dtype
from tests.gpu.kernel_driver import Array, Family, KernelDriver, weight_shapes
from tools.gpu.step_times import graph_times
from tools.widths import parents

SHAPES = {
    "0.6b": Family(
        hidden=1024,
        inner=3072,
        heads=16,
        kv_heads=8,
        head_dim=128,
        layers=28,
        vocabulary=151_936,
        tied=True,
        qk_norm=True,
    ),
    "4b": Family(
        hidden=2560,
        inner=9728,
        heads=32,
        kv_heads=8,
        head_dim=128,
        layers=36,
        vocabulary=151_936,
        tied=True,
        qk_norm=True,
    ),
}
CAPACITY = 2048
LARGEST_TREE = 64
BLOCKS: dict[Kind, int] = {"int8": 128, "int4": 32}
SIZES = "rows, tokens, filled, slots"
STEPS = ((1, 1, 100, 256), (1, 1, 1000, 2048), (8, 1, 100, 256), (8, 1, 1000, 2048))
WIDER = ((1, 8, 100, 256), (1, 60, 100, 256), (8, 8, 100, 256), (1, 128, 0, 256), (1, 512, 0, 1024))
TREES = tuple(sizes for sizes in WIDER if sizes[1] <= LARGEST_TREE)
PROFILED = (STEPS[0], STEPS[1], STEPS[2], WIDER[0], WIDER[1], WIDER[-1])
PROFILED_LAYERS = 3


def repeated_weights(family: Family) -> dict[str, Array]:
    """Random numbers, the same for every tensor of a kind: what is timed does not see it."""
    random = np.random.default_rng(0)
    known: dict[tuple[str, tuple[int, ...]], Array] = {}
    pool = random.standard_normal((1 << 22) - 3, np.float32).astype(np.float16)
    found = {}
    for name, shape in weight_shapes(family).items():
        kind = (name.rpartition(".")[2], shape)
        if kind not in known:
            share = np.float16(0.5 / shape[-1] ** 0.5)
            flat = np.ones(shape, np.float16) if len(shape) == 1 else np.resize(pool * share, shape)
            known[kind] = flat.astype(numpy_dtype("float16"), copy=False)
        found[name] = known[kind]
    return found


def quantised_weights(family: Family, kind: Kind, *, head: bool) -> dict[str, Array]:
    """Weights of `repeated_weights` with matrices, and the head or not, in random integers."""
    random, found, block = np.random.default_rng(1), {}, BLOCKS[kind]
    known: dict[tuple[int, ...], tuple[Array, Array]] = {}
    weights = repeated_weights(family)
    if head:
        weights["head"] = weights["embedding"]
    for name, whole in weights.items():
        if whole.ndim == 1 or name == "embedding":
            found[name] = whole
            continue
        rows, columns = whole.shape
        if whole.shape not in known:
            width = columns // (2 if kind == "int4" else 1)
            step = {"int4": 0.1, "int8": 0.006}[kind] / columns**0.5
            scales = random.uniform(-step, step, (rows, columns // block)).astype(np.float16)
            known[whole.shape] = (random.integers(0, 256, (rows, width), np.uint8), scales)
        found[name], found[f"{name}.scale"] = known[whole.shape]
    return found


def tree_options(family: Family) -> dict[str, Any]:
    """Options of an engine that is the base of a draft."""
    taps = tuple(sorted({min(1, family.layers - 1), family.layers // 2, family.layers - 1}))
    return {
        "enable_eagle_spec_decode": True,
        "eagle_layers": taps,
        "output_hidden_dim": len(taps) * family.hidden,
        "max_verify_tree_size": LARGEST_TREE,
    }


class Times:
    """The steps of one model: 0.6b, 0.6b-int8, 0.6b-int4 or, but for the head, 0.6b-int4b.

    With `trees` it is the base of a draft, and several tokens of a row are a tree.
    """

    def __init__(
        self, device: CudaDevice, name: str, *, layers: int = 0, trees: bool = False, **changes: Any
    ) -> None:
        size, _, kind = name.partition("-")
        family = SHAPES[size]
        self.device, self.family = device, family._replace(layers=layers or family.layers)
        self.trees = trees
        began = time.monotonic()
        if kind:
            integers: Kind = "int8" if kind.startswith("int8") else "int4"
            weights = quantised_weights(self.family, integers, head=not kind.endswith("b"))
        else:
            weights = repeated_weights(self.family)
        made = time.monotonic()
        before = device.library.compiler.compiled
        self.driver = KernelDriver(
            device,
            self.family,
            "float16",
            weights=weights,
            most_selected=8,
            max_kv_cache_capacity=CAPACITY,
            prefill_chunk=512,
            **(tree_options(self.family) if trees else {}),
            **changes,
        )
        self.opened = {
            "weights_s": round(made - began, 2),
            "open_and_upload_s": round(time.monotonic() - made, 2),
            "compiled": device.library.compiler.compiled - before,
            "scratch_mb": self.driver.engine.required_context_memory >> 20,
        }

    def dims(self, rows: int, tokens: int, filled: int, slots: int) -> InferenceDims:
        """A step behind so many filled slots; chosen nodes of a tree all get logits."""
        driver, of_tree = self.driver, self.trees and 1 < tokens <= LARGEST_TREE
        driver.filled[:] = filled
        grown = [parents(tokens)] * rows if of_tree else None
        every = of_tree or tokens == WIDER[0][1]
        return driver.feed([[7] * tokens] * rows, kv_len=slots, every=every, parents=grown)

    def step(self, *sizes: int) -> dict[str, Any]:
        """Milliseconds of a captured step, and microseconds of the host for it."""
        driver, stream = self.driver, self.device.stream
        dims = self.dims(*sizes)
        bindings = driver.bindings(dims)
        began = time.perf_counter()
        driver.engine.run(bindings, stream)
        first = time.perf_counter() - began
        stream.synchronize()
        began = time.perf_counter()
        driver.engine.run(bindings, stream)
        run = time.perf_counter() - began
        graph = driver.engine.capture(bindings, stream)
        return {
            SIZES: sizes,
            **graph_times(graph, self.device.context, stream),
            "run_host_us": round(run * 1e6),
            "build_and_run_host_us": round(first * 1e6),
        }

    def profile(self, *sizes: int) -> None:
        """One plain step that a profiler sees; its sizes are printed before."""
        sys.stdout.write(f"step {' '.join(map(str, sizes))}\n")
        sys.stdout.flush()
        bindings = self.driver.bindings(self.dims(*sizes))
        call = self.device.context.driver.call
        self.driver.engine.run(bindings, self.device.stream)
        self.device.stream.synchronize()
        call("cuProfilerStart")
        self.driver.engine.run(bindings, self.device.stream)
        self.device.stream.synchronize()
        call("cuProfilerStop")


def figures(device: CudaDevice, name: str) -> Iterator[dict[str, Any]]:
    """Figures of a model, line by line."""
    times = Times(device, name)
    yield {"model": name, **times.opened}
    for sizes in (*STEPS, *WIDER):
        yield {"model": name, **times.step(*sizes)}
    times.driver.close()
    times = Times(device, name, trees=True)
    for sizes in TREES:
        yield {"model": name, "trees": True, **times.step(*sizes)}
    times.driver.close()


def main() -> None:
    """Print a JSON line for each step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=["0.6b"])
    parser.add_argument("--profile", action="store_true")
    chosen = parser.parse_args()
    device = open_cuda_device()
    for name in chosen.models:
        if chosen.profile:
            times = Times(device, name, layers=PROFILED_LAYERS, trees=True)
            for sizes in PROFILED:
                times.profile(*sizes)
            times.driver.close()
            continue
        for line in figures(device, name):
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()
    device.close()


if __name__ == "__main__":
    main()
