import ctypes
from math import prod
from typing import Any

import numpy as np
import pytest

from hearth.runtime.config import LLMEngineRunnerConfig
from hearth.runtime.device.cuda.compiler import KernelCompiler, kernel_source, load_compiler_api
from hearth.runtime.device.cuda.launch import Launch
from hearth.runtime.device.cuda.programs import WantedKernels
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.engine import Binding, IOTensor
from hearth.runtime.executor.kernels import step as module
from hearth.runtime.executor.kernels.engine import io_tensors_of
from hearth.runtime.executor.kernels.product_arguments import Form, bound_weight, weight_forms
from hearth.runtime.executor.kernels.step import (
    DecoderStep,
    ResidualStream,
    StepShape,
    StreamArguments,
    StreamConfig,
)
from hearth.runtime.tensors.profiles import InferenceDims
from tests.runtime.executor.kernels.kernel_engines import (
    FACTS,
    bindings_of,
    kernels_config,
    layout_of,
    registry_of,
)

BASE = 1 << 40


class Recorder:
    """Products or attention that note what they are asked for, as one launch each."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.scratch = 0

    def use_scratch(self, address: int, _rows: int = 0) -> None:
        self.scratch = address

    def scratch_bytes(self, *sizes: int) -> int:
        return prod(sizes)

    ticket_bytes = scratch_bytes

    def use_mailbox(self, address: int, tokens: int, width: int) -> tuple[int, int]:
        return (address, tokens * width) if width else (0, 0)

    def stages(self, *_: Any) -> bool:
        return False

    takes_stages = stages

    def __getattr__(self, name: str) -> Any:
        def launch(*arguments: Any, **named: Any) -> tuple[Launch, ...]:
            adapter = named.pop("adapter", None)
            assert not named.pop("staged", False)
            noted: Any = (*arguments, *named.values(), *([adapter] if adapter else []))
            return (Launch(None, (1, 1, 1), 1, 0, noted, name),)

        return launch


class Step:
    """The launches of a decoder of these facts, with the names that its addresses have."""

    def __init__(self, config: LLMEngineRunnerConfig, **facts: bool) -> None:
        layout = layout_of(config, **facts)
        registry = registry_of(config, layout)
        self.io = io_tensors_of(config, registry)
        self.step = DecoderStep(config, layout, self.io, WantedKernels(), FACTS)
        shapes = [StepShape(4, 8, 64, 8), StepShape(1, 16, 64, 1), StepShape(4, 1, 64, 1)]
        self.memory = self.step.provide(shapes)
        self.step.use_scratch(BASE)
        self.registry = registry
        self.names = {number << 20: one.name for number, one in enumerate(self.io, 1)}

    def bindings(self, dims: InferenceDims) -> tuple[Binding, ...]:
        return bindings_of(self.io, self.registry, dims)

    def launches(self, dims: InferenceDims) -> list[tuple[str, tuple[Any, ...]]]:
        """Each with its arguments; an address of a binding or of scratch is its name."""
        offsets = self.step._offsets
        names = self.names | {BASE + offset: name for name, offset in offsets.items()}
        # Two parts at one place: the later in a layer is not what attention is given.
        names[BASE + offsets["projected"]] = "projected or activations"
        names[BASE + offsets["activations"]] = "projected or activations"

        def named(one: Any) -> Any:
            if isinstance(one, StreamArguments):
                return tuple(named(getattr(one, field[0])) for field in one._fields_)
            if isinstance(one, tuple):
                return tuple(named(part) for part in one)
            return names.get(one, one) if isinstance(one, int) and one >= 1 << 20 else one

        made = self.step.launches(self.bindings(dims))
        return [(one.name, named(one.arguments)) for one in made]


@pytest.fixture(autouse=True)
def _recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Products", Recorder)
    monkeypatch.setattr(module, "Attention", Recorder)


def test_a_layer_is_five_launches_between_the_first_and_the_last() -> None:
    made = Step(kernels_config()).launches(InferenceDims.decode(4, 64))
    layer = ["normed", "launches", "residual", "gated", "residual"]
    assert [name for name, _ in made] == ["begin", *layer, *layer, "head"]
    form = Form("float16", 0, zeros=False)

    def weight(name: str, rows: int) -> tuple[Any, ...]:
        return (f"layers.1.{name}", rows, form, 0, 0, 0)

    assert made[0][1] == ("inputs_embeds", "stream", 0, 0, 4 * 4, 4, 0, 0)
    qkv = (weight("q", 32), weight("k", 16), weight("v", 16))
    shared = "projected or activations"
    assert made[6][1] == ("stream", "layers.1.input_norm", 1e-6, qkv, 32, 4, shared)
    assert made[7][1] == (
        shared,
        ("layers.1.q_norm", "layers.1.k_norm"),
        ("k_cache_1", "v_cache_1"),
        "kvcache_start_index",
        "attention_pos_id",
        ("rope_cos", "rope_sin"),
        0,
        "attended",
        4,
        1,
        64,
    )
    assert made[8][1] == ("attended", weight("o", 32), 32, 4, "stream")
    gates = (weight("gate", 64), weight("up", 64))
    assert made[9][1] == ("stream", "layers.1.post_norm", 1e-6, *gates, 32, 4, shared)
    assert made[10][1] == (shared, weight("down", 32), 64, 4, "stream", None)
    head = ("embedding", 100, form, 0, 0, 0)
    assert made[11][1] == ("stream", "norm", 1e-6, head, 32, 4, 1, 1, "last_token_ids", "logits")


def test_biases_and_a_head_of_its_own_are_bound() -> None:
    made = Step(kernels_config(), tied=False, biased=True).launches(InferenceDims.prefill(1, 9, 64))
    weights = made[1][1][3]
    assert [one[-1] for one in weights] == [f"layers.0.{one}_bias" for one in "qkv"]
    assert made[-1][1][3][0] == "head"
    assert made[-1][1][5:8] == (1, 9, 1)


def test_taps_are_the_inputs_of_their_layers() -> None:
    config = kernels_config(
        enable_eagle_spec_decode=True,
        eagle_layers=(2, 0, 1),
        output_hidden_dim=96,
        max_verify_tree_size=8,
        chains_only=True,
    )
    made = Step(config).launches(InferenceDims.spec_verify(2, 8, 64))
    ends = [arguments[-1] for name, arguments in made if name == "residual"]
    tap = Step(config)
    hidden = next(place for place, name in tap.names.items() if name == "hidden_states")
    # 32 numbers of two bytes each.
    assert ends[1::2] == [(hidden + 128, 96), ("hidden_states", 96)]
    assert made[0][1][2] == hidden + 64
    assert made[0][1][-2] == 96 // 8


def test_numbers_of_x_a_are_cleared_in_their_place_alone() -> None:
    config = kernels_config(max_supported_lora_rank=16, lora_targets=("qkv", "gate_up"))
    step = Step(config)
    dims = InferenceDims.decode(4, 64)
    (begin, *_) = step.step.launches(step.bindings(dims))
    arguments: Any = begin.arguments
    assert arguments.cleared == BASE + step.step._offsets["mailbox"]
    # Three matrices, sixteen ranks each, four at a time.
    assert arguments.numbers == 4 * 48 // 4
    none = [
        one._replace(shape=shape) if one.name.startswith("lora_") else one
        for one in step.bindings(dims)
        for shape in [(one.shape[-1], 0) if "_a_" in one.name else (0, one.shape[0])]
    ]
    (begin, *_) = step.step.launches(none)
    arguments = begin.arguments
    assert (arguments.cleared, arguments.numbers) == (0, 0)


def test_deepstack_features_are_added_behind_their_layers() -> None:
    config = kernels_config(num_deepstack_features=1, image_token_id=7)
    made = Step(config).launches(InferenceDims.prefill(1, 16, 64))
    assert [name for name, _ in made][5:8] == ["residual", "add", "normed"]
    assert made[6][1][:2] == ("deepstack_embeds_0", "stream")


@pytest.mark.parametrize("dims", [(5, 8, 64), (1, 33, 64), (4, 8, 128)])
def test_a_step_that_was_not_provided_for_is_refused(dims: tuple[int, int, int]) -> None:
    made = Step(kernels_config())
    assert made.memory.tickets == 4 * 8 * 64
    made.step.launches(made.bindings(InferenceDims.prefill(4, 8, 64)))
    with pytest.raises(HearthError, match="nothing was provided for a step of"):
        made.step.launches(made.bindings(InferenceDims.prefill(*dims)))


def test_counters_that_were_not_provided_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Step(kernels_config())
    monkeypatch.setattr(made.step._attention, "ticket_bytes", lambda *_: made.memory.tickets + 1)
    with pytest.raises(HearthError, match="nothing was provided for a step of"):
        made.step.launches(made.bindings(InferenceDims.prefill(4, 8, 64)))


def test_forms_are_told_from_the_bindings() -> None:
    uint8, half = np.dtype(np.uint8), np.dtype(np.float16)
    io = [
        IOTensor("layers.0.q", "input", uint8, (32, 16)),
        IOTensor("layers.0.q.scale", "input", half, (32, 1)),
        IOTensor("layers.0.q.zero", "input", uint8, (32, 1)),
        IOTensor("layers.0.down", "input", uint8, (32, 64)),
        IOTensor("layers.0.down.scale", "input", half, (32, 2)),
        IOTensor("layers.0.q_norm", "input", half, (16,)),
        IOTensor("embedding", "input", half, (100, 32)),
    ]
    forms = weight_forms(io, kernels_config())
    assert {name: (one.rows, one.form) for name, one in forms.items()} == {
        "layers.0.q": (32, Form("int4", 32, zeros=True)),
        "layers.0.down": (32, Form("int8", 32, zeros=False)),
        "embedding": (100, Form("float16", 0, zeros=False)),
    }
    for wrong in (io[0]._replace(dtype=half), io[0]._replace(shape=(32, 8))):
        with pytest.raises(HearthError, match="do not read") as caught:
            weight_forms([wrong], kernels_config())
        assert caught.value.field == "layers.0.q"


@pytest.mark.parametrize(
    ("name", "rows", "inputs"),
    [("layers.0.k", 32, 32), ("layers.0.up", 32, 32), ("layers.0.o", 64, 32), ("head", 99, 32)],
)
def test_a_matrix_with_rows_that_the_step_has_no_room_for_is_refused(
    name: str, rows: int, inputs: int
) -> None:
    matrix = IOTensor(name, "input", np.dtype(np.float16), (rows, inputs))
    with pytest.raises(HearthError, match=f"{name} has {rows} rows") as caught:
        weight_forms([matrix], kernels_config())
    assert (caught.value.code, caught.value.field) == ("engine_incompatible", name)


def test_a_matrix_that_the_weights_lack_is_refused_by_name() -> None:
    with pytest.raises(HearthError, match=r"the weights lack layers\.0\.q") as caught:
        bound_weight({}, "layers.0.q", {})
    assert (caught.value.code, caught.value.field) == ("engine_incompatible", "layers.0.q")


def test_a_thread_takes_eight_elements() -> None:
    wanted = WantedKernels()
    stream = ResidualStream(wanted, "bfloat16", 72)
    assert {(one.name, one.config) for one in wanted.requests} == {
        ("begin", StreamConfig(bfloat=True)),
        ("add", StreamConfig(bfloat=True)),
    }
    launch = stream.begin(1 << 40, 1 << 41, 33, (1 << 42, 216), (1 << 43, 384))
    # 33 * 9 pieces in blocks of 128.
    assert (launch.grid, launch.block, launch.shared_bytes) == ((3, 1, 1), 128, 0)
    assert fields(launch.arguments) == (1 << 40, 1 << 41, 1 << 42, 1 << 43, 297, 9, 27, 96)
    assert fields(stream.add(5, 6, 1).arguments) == (5, 6, 0, 0, 9, 9, 0, 0)
    assert ctypes.sizeof(StreamArguments) == 48


def fields(arguments: Any) -> tuple[int, ...]:
    return tuple(getattr(arguments, name) for name, _ in arguments._fields_)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize("bfloat", [False, True])
def test_the_source_compiles(tmp_path: Any, architecture: str, *, bfloat: bool) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", exc_type=ImportError)
    made = KernelCompiler(load_compiler_api(), architecture, tmp_path)
    source = kernel_source("decoder/enter", StreamConfig(bfloat=bfloat))
    assert made.compile("enter", source, ()).startswith(b"\x7fELF")
