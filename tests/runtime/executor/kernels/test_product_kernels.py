"""Kernels but those of attention are compiled for GPUs that are not here: nothing is spilled.

Registers must suffice for the blocks that are planned; what they take of shared memory is asserted
in the source.
"""

import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from hearth.runtime.device.cuda.compiler import config_fields, load_compiler_api
from hearth.runtime.device.cuda.gpu_facts import GpuFacts
from hearth.runtime.device.cuda.programs import KernelRequest, WantedKernels
from hearth.runtime.executor.kernels.adapters import Adapter
from hearth.runtime.executor.kernels.draft_step import DraftPieces
from hearth.runtime.executor.kernels.product_arguments import Form, Weight
from hearth.runtime.executor.kernels.products import Products
from tests.runtime.executor.kernels.model_shapes import GPUS, MODELS, ModelShape
from tests.runtime.executor.kernels.ptxas import ptxas_log

pytest.importorskip("cuda.bindings.nvrtc", exc_type=ImportError)
pytestmark = pytest.mark.slow

REGISTERS = 65_536
FLOAT = Form("float16")
QUANTISED = [
    (Form("int4", 32), 1), (Form("int4", 128, zeros=True), 0), (Form("int8", 64), 0),
    (Form("int8", 32, zeros=True), 1),
]  # fmt: skip
"""Forms of integers, and whether their scales are bfloat16."""
WIDTHS = (8, 16, 32, 64, 512)
LARGE, SMALL, BOARD = (GPUS[name] for name in ("H200", "RTX 3090", "Orin"))
ALL_WIDTHS = {"sm_87": BOARD, "sm_90": LARGE, "sm_120": SMALL._replace(capability=(12, 0))}
SOME_WIDTHS = {
    "sm_80": BOARD._replace(capability=(8, 0)),
    "sm_86": SMALL,
    "sm_89": SMALL._replace(capability=(8, 9)),
    "sm_100": LARGE._replace(capability=(10, 0)),
    "sm_110": LARGE._replace(capability=(11, 0)),
    "sm_121": SMALL._replace(capability=(12, 1)),
}


def _weight(rows: int, form: Form) -> Weight:
    return Weight(0, rows, form, bias=1)


def qkv(products: Products, model: ModelShape, tokens: int, form: Form) -> None:
    weights = [_weight(rows, form) for rows in (model.queries, model.keys, model.keys)]
    products.normed(0, 1, 0.0, weights, model.hidden, tokens, 0)


def down(products: Products, model: ModelShape, tokens: int, form: Form) -> None:
    weight = _weight(model.hidden, form)._replace(bias=0)
    products.residual(0, weight, model.inner, tokens, 0, tap=(1, 8))


def gated(products: Products, model: ModelShape, tokens: int, form: Form) -> None:
    one = _weight(model.inner, form)._replace(bias=0)
    products.gated(0, 1, 0.0, one, one, model.hidden, tokens, 0)


def head(products: Products, model: ModelShape, tokens: int, form: Form) -> None:
    weight = _weight(model.vocabulary, form)._replace(bias=0)
    products.head(0, 1, 0.0, weight, model.hidden, tokens, 1, 1, 0, 0)


KINDS: list[Callable[[Products, ModelShape, int, Form], None]] = [qkv, down, gated, head]


@cache
def known() -> frozenset[str]:
    _, numbers = load_compiler_api().nvrtcGetSupportedArchs()
    return frozenset(f"sm_{number}" for number in numbers)


def compiled(request: KernelRequest, architecture: str) -> str:
    """The log of ptxas for a kernel."""
    # As the compiler takes it, with the instructions that no later GPU has.
    target = {"sm_90": "sm_90a"}.get(architecture, architecture)
    return ptxas_log(target, request.file, request.config)


def check(
    architecture: str,
    facts: GpuFacts,
    chosen: list[tuple[int, int, str]],
    form: Form = FLOAT,
    dtype: Any = np.float16,
) -> None:
    """Compile the products of `chosen`, each a place in KINDS, a width and a model."""
    if architecture not in known():
        pytest.skip(f"this NVRTC does not know {architecture}")
    wanted = WantedKernels()
    products = Products(wanted, facts, np.dtype(dtype))
    for kind, width, model in chosen:
        KINDS[kind % len(KINDS)](products, MODELS[model], width, form)
    for request in wanted.requests:
        log = compiled(request, architecture)
        found, options = config_fields(request.config), f"{request.config}\n{log}"
        (registers,) = re.findall(r"Used (\d+) registers", log)
        block = 128 if "split" in found else 256
        threads = block * found["resident"] if "resident" in found else 128
        if request.file == "gemm/wgmma":
            threads = found["resident"] * (found["eights"] // 8 * found["shares"] + 1) * 128
        assert int(registers) * threads <= REGISTERS, options
        ((stored, loaded),) = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill", log)
        # With zero points, which no export writes yet, the widest tiles spill a few registers.
        assert max(int(stored), int(loaded)) <= (128 if form.zeros else 0), options


@pytest.mark.parametrize("architecture", ALL_WIDTHS)
def test_products_of_every_width_compile_for(architecture: str) -> None:
    turn = list(ALL_WIDTHS).index(architecture)
    chosen = [(turn + place, width, "0.6B") for place, width in enumerate(WIDTHS)]
    large = [(turn + 2, 8, "4B"), (turn + 3, 64, "4B")]
    check(architecture, ALL_WIDTHS[architecture], [*chosen, *large])


@pytest.mark.parametrize("architecture", SOME_WIDTHS)
def test_the_narrowest_and_the_widest_product_compile_for(architecture: str) -> None:
    turn = list(SOME_WIDTHS).index(architecture)
    check(architecture, SOME_WIDTHS[architecture], [(turn, 8, "0.6B"), (turn + 1, 512, "4B")])


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_products_of_odd_sizes_compile(kind: int) -> None:
    check("sm_86", SMALL, [(kind, width, "toy") for width in (8, 16, 512)])


@pytest.mark.parametrize(
    ("architecture", "form", "bfloat"),
    [
        *(("sm_90", *one) for one in QUANTISED),
        *(("sm_87", *one) for one in QUANTISED[::2]),
        *(("sm_120", *one) for one in QUANTISED[1::2]),
    ],
    ids=str,
)
def test_products_of_integers_compile_for(architecture: str, form: Form, bfloat: int) -> None:
    turn = list(ALL_WIDTHS).index(architecture) + QUANTISED.index((form, bfloat))
    chosen = [(turn + place, width, "0.6B") for place, width in enumerate((8, 8, 64, 512))]
    dtype = ml_dtypes.bfloat16 if bfloat else np.float16
    check(architecture, ALL_WIDTHS[architecture], [*chosen, (turn, 8, "4B")], form, dtype)


def wanted() -> Iterator[KernelRequest]:
    kernels = WantedKernels()
    pieces = DraftPieces(kernels, "bfloat16")
    pieces.fuse(0, 0, 0, (0, 0), 0.0, 0, 8, 1, given=True)
    pieces.log_softmax(0, 0, 1, 9)
    three, two, one = (Adapter(0, 0, 0, 0, parts * 64, 64) for parts in (3, 2, 1))
    products = Products(kernels, GPUS["H200"], np.dtype(np.float16))
    weight = Weight(0, 1024, Form("float16"))
    for tokens in (1, 64, 512):
        shape = (1024, tokens)
        products.normed(0, 1, 0.0, [weight] * 3, *shape, 0, adapter=three)
        products.gated(0, 1, 0.0, weight, weight, *shape, 0, adapter=two)
        products.residual(0, weight, 9728, tokens, 0, adapter=one)
    # The others of a file are compiled with it.
    yield from {one.program: one for one in kernels.requests}.values()


@pytest.mark.parametrize("architecture", ["sm_80", "sm_87", "sm_90", "sm_120"])
def test_small_kernels_spill_nothing(architecture: str) -> None:
    if architecture not in known():
        pytest.skip(f"this NVRTC lacks {architecture}")
    for request in wanted():
        if architecture != "sm_90" and request.file in ("gemm/gemv", "gemm/tiled"):
            continue  # They are planned for an H200.
        log = compiled(request, architecture)
        assert "0 bytes spill stores, 0 bytes spill loads" in log
        assert log.count("spill stores") == log.count(" 0 bytes spill stores"), log
