import ctypes
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest

from hearth.runtime.device.cuda.compiler import config_fields
from hearth.runtime.device.cuda.launch import Launch
from hearth.runtime.device.cuda.programs import KernelRequest, WantedKernels
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.kernels.adapters import Adapter
from hearth.runtime.executor.kernels.product_arguments import Form, ProductArguments, Weight
from hearth.runtime.executor.kernels.products import Products
from tests.runtime.executor.kernels.model_shapes import GPUS

FLOAT = Form("float16")
X, GAIN, OUT, SCRATCH, LAST = (0x1000 * place for place in range(1, 6))
EPS = 1e-6


def weight(rows: int, address: int = 0x100, bias: int = 0) -> Weight:
    return Weight(address, rows, FLOAT, bias=bias)


class Made:
    """Products on a GPU, and what they asked for."""

    def __init__(self, dtype: Any = np.float16, gpu: str = "H200") -> None:
        self.wanted = WantedKernels()
        self.products = Products(self.wanted, GPUS[gpu], np.dtype(dtype))
        self.products.use_scratch(SCRATCH)

    @property
    def requests(self) -> list[KernelRequest]:
        return list(self.wanted.requests)


def fields(request: KernelRequest) -> dict[str, Any]:
    return config_fields(request.config)


def names(launches: tuple[Launch, ...]) -> list[str]:
    return [launch.name for launch in launches]


@pytest.mark.parametrize(("rows", "tokens", "early"), [(1, 8, 1), (8, 8, 0), (0, 1, 1), (1, 9, 0)])
def test_the_next_kernel_begins_early_behind_few_tokens_of_one_row(
    rows: int, tokens: int, early: int
) -> None:
    made = Made()
    made.products.use_scratch(SCRATCH, rows)
    (launch,) = made.products.residual(X, weight(1024), 1024, tokens, OUT)
    assert cast(ProductArguments, launch.arguments).early == early


@pytest.mark.parametrize(("rows", "tokens", "early"), [(1, 1, 2), (1, 2, 1), (8, 1, 0)])
def test_blocks_of_one_token_run_once_before_they_wait(rows: int, tokens: int, early: int) -> None:
    made = Made()
    made.products.use_scratch(SCRATCH, rows)
    (launch,) = made.products.normed(X, GAIN, EPS, [weight(4096)], 1024, rows * tokens, OUT)
    assert cast(ProductArguments, launch.arguments).early == early


def test_few_tokens_are_normed_in_the_product() -> None:
    made = Made(ml_dtypes.bfloat16)
    weights = [weight(2048, 0x100, bias=0x200), weight(1024), weight(1024)]
    (launch,) = made.products.normed(X, GAIN, EPS, weights, 1024, 8, OUT)
    (request,) = made.requests
    assert (request.file, request.name) == ("gemm/gemv", "product")
    found = fields(request)
    assert (
        found.items()
        >= {
            "bfloat": 1,
            "inputs": 1024,
            "columns": 8,
            "output": 0,
            "matrices": 3,
            "biased": 1,
            "normed": 1,
            "repeated": 0,
        }.items()
    )
    # Half of a multiprocessor's, so that it takes one block.
    assert launch.shared_bytes == request.shared_bytes == 233_472 // 2
    assert (launch.grid, launch.block) == ((128, 1, 1), 256)
    a = launch.arguments
    assert isinstance(a, ctypes.Structure)
    assert (a.inputs, a.gain, a.out, a.last) == (X, GAIN, OUT, 0)
    assert (a.tokens, a.rows, a.groups) == (8, 4096, 128)
    assert [(one.values, one.bias, one.rows) for one in a.matrices] == [
        (0x100, 0x200, 2048),
        (0x100, 0, 1024),
        (0x100, 0, 1024),
    ]
    assert ctypes.sizeof(a) == 248


@pytest.mark.parametrize(
    ("gpu", "inputs", "tokens"),
    [
        ("RTX 3090", 1024, 9),
        ("RTX 3090", 1024, 64),
        ("H200", 4096, 1),
        ("H200", 4096, 9),
        ("H200", 1024, 64),
        ("H200", 1024, 512),
    ],
)
def test_others_are_normed_before_it(gpu: str, inputs: int, tokens: int) -> None:
    made = Made(gpu=gpu)
    launches = made.products.gated(X, GAIN, EPS, weight(64), weight(64), inputs, tokens, OUT)
    assert names(launches) == ["normalise", "gated"]
    norm, product = (launch.arguments for launch in launches)
    assert (norm.inputs, norm.gain, norm.out, norm.stride) == (X, GAIN, SCRATCH, inputs)
    assert (product.inputs, product.gain, product.out) == (SCRATCH, 0, OUT)
    assert product.rows == 64
    assert made.products.scratch_bytes(inputs, tokens) == inputs * tokens * 2
    assert launches[0].grid == (-(-tokens // 4), 1, 1)


def test_what_norms_itself_needs_no_scratch_memory() -> None:
    assert Made().products.scratch_bytes(1024, 8) == 0


@pytest.mark.parametrize("tokens", [1, 64, 300])
def test_a_residual_is_added_in_place_and_tapped(tokens: int) -> None:
    made = Made()
    launches = made.products.residual(X, weight(1024), 2048, tokens, OUT, tap=(0x9000, 3072))
    (launch,) = launches
    (request,) = made.requests
    assert fields(request)["output"] == 1
    assert request.file == ("gemm/tiled" if tokens > 64 else "gemm/gemv")
    a = launch.arguments
    assert (a.inputs, a.out, a.tap, a.tap_stride) == (X, OUT, 0x9000, 3072)


def test_the_head_selects_tokens_where_they_are_normed() -> None:
    made = Made()
    (one,) = made.products.head(X, GAIN, EPS, weight(151_936), 1024, 2, 7, 3, LAST, OUT)
    a = one.arguments
    assert (a.last, a.seq_len, a.select_len, a.tokens, a.rows) == (LAST, 7, 3, 6, 151_936)
    assert fields(made.requests[0])["repeated"] == 1
    norm, product = made.products.head(X, GAIN, EPS, weight(264), 1024, 2, 70, 33, LAST, OUT)
    assert (norm.arguments.last, norm.arguments.seq_len, norm.arguments.select_len) == (
        LAST,
        70,
        33,
    )
    assert (product.arguments.last, product.arguments.tokens) == (0, 66)


def test_the_head_of_many_tokens_is_normed_before_a_wide_product() -> None:
    made = Made()
    launches = made.products.head(X, GAIN, EPS, weight(151_936), 1024, 1, 60, 60, LAST, OUT)
    assert names(launches) == ["normalise", "head"]
    norm, product = (launch.arguments for launch in launches)
    assert (norm.last, norm.tokens) == (LAST, 60)
    assert (product.inputs, product.gain, product.last) == (SCRATCH, 0, 0)
    assert made.requests[-1].file == "gemm/tiled"


def test_several_tokens_are_shared_out_over_the_gpu() -> None:
    made = Made()
    for tokens, shares in ((33, 2), (32, 2), (17, 2), (16, 1)):
        (launch,) = made.products.residual(X, weight(1024), 2048, tokens, OUT)
        assert launch.grid[1] == shares, tokens
        found = fields(made.requests[-1])
        assert (found["shares"], found["columns"] * shares >= tokens) == (shares, True)
        assert found["token_stages"] == 4


def test_plain_products_take_one_matrix_or_several() -> None:
    made = Made()
    (one,) = made.products.plain(X, weight(64), 200, 1, OUT)
    (both,) = made.products.plain(X, [weight(64), weight(32)], 200, 1, OUT)
    assert (one.arguments.rows, both.arguments.rows) == (64, 96)
    assert [fields(request)["matrices"] for request in made.requests] == [1, 2]


@pytest.mark.parametrize("tokens", [1, 300])
def test_integers_are_read_with_their_scales(tokens: int) -> None:
    made, form = Made(), Form("int4", 32, zeros=True)
    quantised = [Weight(0x100, 64, form, 0x200, 0x300), Weight(0x400, 8, form, 0x500, 0x600)]
    (launch,) = made.products.plain(X, quantised, 128, tokens, OUT)
    found = fields(made.requests[0])
    assert found.items() >= {"weight_bits": 4, "scale_block": 32, "zeros": 1}.items()
    first, second, _ = launch.arguments.matrices
    assert (first.values, first.scale, first.zero) == (0x100, 0x200, 0x300)
    assert (second.scale, second.rows) == (0x500, 8)
    # Stages of integers take less of shared memory than those of elements.
    (whole,) = made.products.plain(X, weight(72), 128, tokens, OUT)
    assert launch.shared_bytes < whole.shared_bytes


def test_matrices_of_one_product_have_one_form() -> None:
    with pytest.raises(HearthError, match="have one form"):
        Made().products.plain(X, [weight(8), Weight(1, 8, Form("int4", 32))], 64, 1, OUT)


@pytest.mark.parametrize(
    ("form", "nbytes"),
    [(Form("bfloat16"), 1024), (Form("int8", 64), 544), (Form("int4", 128, zeros=True), 320)],
)
def test_eight_rows_of_a_form_take(form: Form, nbytes: int) -> None:
    assert form.eight_bytes == nbytes


def adapter(matrices: int) -> Adapter:
    return Adapter(0x10, 0x20, 0x30, 0x40, matrices * 16, 16)


def test_blocks_of_a_product_of_few_tokens_multiply_by_an_adapter() -> None:
    made = Made()
    assert made.products.use_mailbox(1 << 20, 8, 48) == (1 << 20, 384)
    weights = [weight(2048), weight(1024), weight(1024)]
    (launch,) = made.products.normed(X, GAIN, EPS, weights, 1024, 8, OUT, adapter=adapter(3))
    (request,) = made.requests
    assert fields(request).items() >= {"shrink_stages": 2, "added": 1}.items()
    # Three matrices have sixteen ranks each, beside 128 blocks with rows.
    assert launch.grid == (131, 1, 1)
    assert launch.shared_bytes == int(fields(request)["shared_bytes"])
    added: Any = launch.arguments
    found = added.added
    assert (found.a, found.b, found.rank) == (0x10, 0x20, 0x30)
    assert (found.width, found.most, found.blocks) == (48, 16, 3)


def test_products_tell_one_another_in_turns() -> None:
    made = Made()
    for tokens, numbers in ((8, 384), (1, 48)):
        places = (1 << 20, (1 << 20) + 4 * numbers)
        assert made.products.use_mailbox(places[0], tokens, 48) == (places[0], numbers)
        for turn in range(3):
            (launch,) = made.products.residual(
                X, weight(1024), 2048, tokens, OUT, adapter=adapter(1)
            )
            arguments: Any = launch.arguments
            found = arguments.added
            assert (found.shrunk, found.cleared) == (places[turn % 2], places[1 - turn % 2])
            assert found.numbers == numbers


def test_blocks_that_take_groups_in_turn_leave_some_multiprocessors() -> None:
    made = Made()
    made.products.use_mailbox(1 << 20, 1, 128)
    wide = Adapter(0x10, 0x20, 0x30, 0x40, 128, 64)
    (launch,) = made.products.gated(
        X, GAIN, EPS, weight(9728), weight(9728), 2560, 1, OUT, adapter=wide
    )
    arguments: Any = launch.arguments
    # 608 groups are five for each of 124 blocks, as they are for each of 132.
    assert (arguments.groups, arguments.added.blocks) == (608, 8)
    assert launch.grid == (132, 1, 1)


@pytest.mark.parametrize(
    ("gpu", "inputs", "tokens", "wanted"),
    [
        ("RTX 3090", 1024, 8, ["shrink", "normed"]),
        ("H200", 1024, 60, ["normalise", "shrink", "normed"]),
        ("H200", 1024, 300, ["normalise", "shrink", "normed"]),
    ],
)
def test_others_have_a_launch_for_it(gpu: str, inputs: int, tokens: int, wanted: list[str]) -> None:
    made = Made(gpu=gpu)
    weights = [weight(4096), weight(1024), weight(1024)]
    found = made.products.normed(X, GAIN, EPS, weights, inputs, tokens, OUT, adapter=adapter(3))
    assert names(found) == wanted
    assert not any(fields(request).get("shrink_stages") for request in made.requests)


@pytest.mark.parametrize(
    ("tokens", "apart"), [(128, False), (256, False), (384, True), (512, True)]
)
def test_wide_residual_products_wait_for_what_would_crowd_them(tokens: int, *, apart: bool) -> None:
    made = Made()
    (launch,) = made.products.residual(X, weight(1024), 3072, tokens, OUT)
    assert launch.apart == apart
    assert not any(one.apart for one in made.products.plain(X, weight(1024), 1024, tokens, OUT))
