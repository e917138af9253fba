"""The shipped models as `hearth export --device cuda` takes them: in bfloat16, as they are stored.

Sums, trees, adapters and integers of bfloat16 are compared kernel by kernel in `test_kernels.py`
and beside the kernels; here they serve.
"""

from collections.abc import Callable
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec import structs

from hearth.daemon.cli.export import export
from hearth.daemon.shipped import VISION
from hearth.runtime.config import load_config
from hearth.runtime.device.open import open_device
from hearth.runtime.executor.engine import EngineOptions
from hearth.runtime.generation.assembly import share_context_memory
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.options import EagleDraftingConfig, RuntimeOptions, SpeculationOptions
from hearth.runtime.request import GenerationRequest, RequestOptions, RowRequest
from hearth.runtime.text.tokenizer import Tokenizer
from hearth.runtime.tower_answer import check_tower_answer
from hearth.runtime.vision.vision_runner import VisionRunner
from hearth.runtime.vision_config import VISION_FOLDER, load_vision_config
from hearth.runtime.weights.external_weight_manager import answer_of
from models.splits import held_out
from tests.gpu.conftest import CAPACITY, DRAFT, MODEL
from tests.gpu.near_ties import divergences, greedy_row, references
from tests.peft_models import write_peft

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
NEAR_TIE = 0.1
"""Lead, in log probability, that rounding to half precision may turn around."""
TREES = [(4, 3, 16), (10, 6, 60), (1, 7, 8)]
DRAWN = RequestOptions(temperature=0.9, top_p=0.95, top_k=50, logprobs=2, max_tokens=40)
Exported = Callable[..., Path]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Gives an engine folder of the shipped model by the options of the command line."""

    @cache
    def made(*options: str, model: Path = MODEL) -> Path:
        target = tmp_path_factory.mktemp("engines") / "engine"
        arguments = [str(model), str(target), "--device", "cuda", "--capacity", str(CAPACITY)]
        CliRunner().invoke(
            export, [*arguments, *options], standalone_mode=False, catch_exceptions=False
        )
        assert load_config(target).dtype == "bfloat16"
        return target

    return made


def opened(folder: Path, **options: Any) -> LLMInferenceRuntime:
    """A runtime with captured steps that has given its known answer."""
    runtime = LLMInferenceRuntime.open(folder, RuntimeOptions(max_batch=4, **options))
    runtime.capture(range(1, 5))
    assert runtime.counters.failed_captures == 0, runtime.counters.failure
    answer = answer_of(folder, runtime.config)
    assert answer is not None
    print("answer", runtime.check_answer(answer))  # noqa: T201 - reported with the run
    return runtime


def prompts(folder: Path, count: int = 8) -> list[list[int]]:
    tokenizer = Tokenizer.open(folder)
    return [
        tokenizer.encode_pairs([(one["role"], one["content"]) for one in prompt.messages])
        for prompt in held_out()[:: 1200 // count][:count]
    ]


def replies(runtime: LLMInferenceRuntime, rows: list[RowRequest]) -> list[Any]:
    found = []
    for first in range(0, len(rows), runtime.max_batch):
        batch = GenerationRequest(rows=rows[first : first + runtime.max_batch])
        found += runtime.handle_request(batch).rows
    assert [row.error for row in found] == [None] * len(rows)
    return [(row.token_ids, row.logprobs) for row in found]


def test_rows_say_what_they_say_on_the_cpu(
    exported: Exported, cpu_runtime: LLMInferenceRuntime
) -> None:
    folder = exported()
    rows = [greedy_row(ids, 60) for ids in prompts(folder)]
    with closing(opened(folder)) as runtime:
        given = [one.tokens for one in references(runtime, rows)]
    parted = divergences(given, references(cpu_runtime, rows))
    print("divergences", parted)  # noqa: T201 - reported with the run
    assert [one for one in parted if one.lead >= NEAR_TIE] == []


@pytest.mark.parametrize("shape", TREES, ids=str)
def test_trees_and_draws_have_the_bits_of_plain_decoding(
    exported: Exported, shape: tuple[int, int, int]
) -> None:
    folder = exported("--draft", str(DRAFT))
    rows = []
    for seed, ids in enumerate(prompts(folder)):
        options = structs.replace(DRAWN, seed=seed, temperature=0.9 * (seed % 2))
        rows.append(RowRequest(token_ids=ids, prompt_length=len(ids), options=options))
    with closing(opened(folder, speculation=SpeculationOptions(method="off"))) as runtime:
        plain = replies(runtime, rows)
    top_k, step, nodes = shape
    eagle = EagleDraftingConfig(drafting_top_k=top_k, drafting_step=step, verify_tree_size=nodes)
    asked = SpeculationOptions(method="eagle", eagle=eagle, adaptive=False)
    with closing(opened(folder, speculation=asked)) as runtime:
        assert replies(runtime, rows) == plain
        assert runtime.speculation_metrics.rounds > 0


def test_an_adapter_comes_and_goes(exported: Exported, tmp_path: Path) -> None:
    folder = exported("--max-lora-rank", "16")
    for seed, name in enumerate(("first", "second")):
        write_peft(MODEL, tmp_path / name, rank=16 // (1 + seed), alpha=32, seed=seed)
    rows = [greedy_row(ids, 30, ignore_eos=True) for ids in prompts(folder, 4)]
    with closing(opened(folder)) as runtime:
        for name in ("first", "second"):
            runtime.load_adapter(name, tmp_path / name)
        said: dict[str, Any] = {}
        for name in ("", "first", "second", "first", ""):
            asked = [
                structs.replace(row, options=structs.replace(row.options, adapter=name))
                for row in rows
            ]
            given = replies(runtime, asked)
            assert said.setdefault(name, given) == given
    assert said[""] != said["first"] != said["second"]


@pytest.mark.parametrize(
    "options",
    [
        ("--quantization", "int8"),
        ("--quantization", "int4"),
        ("--quantization", "int4", "--head-quantization", "int8"),
        ("--quantization", "int4", "--max-lora-rank", "16", "--draft", str(DRAFT)),
    ],
    ids=" ".join,
)
def test_weights_of_integers_give_the_known_answer(
    exported: Exported, options: tuple[str, ...]
) -> None:
    folder = exported(*options)
    rows = [greedy_row(ids, 30) for ids in prompts(folder, 4)]
    with closing(opened(folder)) as runtime:
        alone = [replies(runtime, [row])[0] for row in rows]
        assert replies(runtime, rows) == alone


def test_a_tower_in_float16_gives_the_decoder_bfloat16(exported: Exported) -> None:
    folder = exported(model=VISION)
    config = load_vision_config(folder)
    assert config is not None
    assert (config.dtype, config.embedding_dtype) == ("float16", "bfloat16")
    with (
        closing(open_device("cuda")) as device,
        closing(
            VisionRunner.open(folder / VISION_FOLDER, config, EngineOptions(), device)
        ) as runner,
    ):
        share_context_memory([runner.executor], device)
        report = check_tower_answer(runner, folder / VISION_FOLDER)
    print("tower", report)  # noqa: T201 - reported with the run
    opened(folder).close()
