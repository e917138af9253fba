"""The shipped model for trials: its engines, and what is said to it."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from hearth.daemon.shipped import DRAFT, SOURCE
from hearth.daemon.shipped_files import EXAMPLE_HOME
from hearth.runtime.config import LLMEngineRunnerConfig, load_config
from hearth.runtime.device.mapped_tensors import map_tensor
from hearth.runtime.engine_folder import DRAFT_FOLDER
from hearth.runtime.export import DraftOptions, ExportOptions, export_model
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.kv_cache.page_pool import page_bytes
from hearth.runtime.options import EagleDraftingConfig, RuntimeOptions, SpeculationOptions
from hearth.runtime.request import RequestOptions
from hearth.runtime.text.tokenizer import Tokenizer
from hearth.runtime.weights.external_weight_manager import ExternalWeightManager
from tests.runtime.generation.schedules.alone import Logits, Voice

CAPACITY = 512
VOICES = 24
"""How many prompts a group of schedules shares."""
_QUESTIONS = (
    "hello",
    "turn on the desk lamp",
    "set the main thermostat to 21 degrees",
    "what is in the kitchen?",
    "list all devices",
    "good night",
    "is the front door locked?",
    "turn on the zephyr fan",
    "the spare key is in the blue box",
    "close the window blind and start the robot vacuum",
)
_LENGTHS = ((1, 9), (1, 30), (20, 90), (90, 220), (230, 320))
Method = Literal["off", "lookup", "eagle"]


class Setting(NamedTuple):
    """How a runtime runs; `budget` is `prefill_budget`.

    `gpu` lets a CPU run as a GPU does: in steps of 1, 2, 4 or 8 rows, queued before the tokens of
    the step before are read, and with one bucket. The prefix cache has room for so many `pages`.
    """

    method: Method = "off"
    chunk: int = 32
    budget: float = 1.0
    gpu: bool = False
    adaptive: bool = False
    tree: tuple[int, int, int] | None = None
    pages: int = 0

    @property
    def name(self) -> str:
        """A few words."""
        words = [self.method, f"chunk {self.chunk}", f"budget {self.budget:g}"]
        words += [f"tree {self.tree}"] if self.tree else []
        words += ["adaptive"] if self.adaptive else []
        words += [f"{self.pages} pages"] if self.pages else []
        return ", ".join([*words, "as a GPU"] if self.gpu else words)


SETTINGS = (
    Setting("eagle", pages=20),
    Setting("off", chunk=16, gpu=True, pages=20),
    Setting("lookup", chunk=32, gpu=True, pages=20),
    Setting("eagle", chunk=64, gpu=True, tree=(3, 2, 8), budget=0.2, pages=20),
    Setting("off", chunk=256, budget=4.0, pages=300),
    Setting("lookup", chunk=64, budget=0.2, adaptive=True, pages=20),
    Setting("eagle", chunk=16, gpu=True, adaptive=True),
)
"""Each has its turn."""


def settings_of(config: LLMEngineRunnerConfig) -> list[Setting]:
    """The settings that an engine takes; trees and batches of a plan are those it was built for."""
    draft = config.enable_eagle_spec_decode
    # A plan without a draft verifies nothing.
    methods = {"off"} if config.backend == "tensorrt" and not draft else {"off", "lookup"}
    methods |= {"eagle"} if draft else set()
    settings = [one for one in SETTINGS if one.method in methods]
    if config.device == "cpu":
        return settings
    return [one._replace(gpu=False, tree=None) for one in settings]


def near_tie_of(config: LLMEngineRunnerConfig) -> float:
    """By how much logits may differ: not a bit by kernels, nor on the CPU in the native dialect."""
    if config.backend == "kernels":
        return 0.0
    if config.dtype != "float32":
        return 2e-2
    return 0.0 if config.device == "cpu" and config.dialect == "native" else 1e-4


def export_home(target: Path, chunk: int, **options: Any) -> Path:
    """The engine folder of the shipped model and its draft."""
    chosen: dict[str, Any] = {"capacity": CAPACITY, "draft": DraftOptions(folder=DRAFT)}
    export_model(SOURCE, target, ExportOptions(**(chosen | options | {"prefill_chunk": chunk})))
    return target


def poison_token(folder: Path) -> int:
    """A token whose embedding is made NaN: whoever runs it has no finite numbers any more."""
    return load_config(folder).vocab_size - 1


def open_runtime(folder: Path, setting: Setting) -> LLMInferenceRuntime:
    """A runtime of this setting with a poisoned embedding table."""
    tree = setting.tree and EagleDraftingConfig(
        drafting_top_k=setting.tree[0],
        drafting_step=setting.tree[1],
        verify_tree_size=setting.tree[2],
    )
    speculation = SpeculationOptions(
        method=setting.method, adaptive=setting.adaptive, eagle=tree or None
    )
    options = RuntimeOptions(
        threads=1 if load_config(folder).device == "cpu" else 0,
        verify=False,
        prefill_budget=setting.budget,
        prefix_cache_bytes=setting.pages * _page_bytes(folder),
        speculation=speculation,
    )

    def poisoned(path: Path, name: str) -> NDArray[Any]:
        table: NDArray[Any] = map_tensor(path, name).copy()
        if name == "embedding":
            table[poison_token(folder)] = np.nan
        return table

    with ExitStack() as patches:
        for user in ("runner.engine_tables", "weights.external_weight_manager"):
            patches.enter_context(patch(f"hearth.runtime.{user}.map_tensor", poisoned))
        # A tied head must not have the poison: it gets a copy of the table.
        load = ExternalWeightManager.load
        apart = patch.object(
            ExternalWeightManager, "load", lambda own, device, _=None: load(own, device)
        )
        patches.enter_context(apart)
        if setting.gpu:
            sizes = patch("hearth.runtime.runner.bindings.decode_batches", lambda _: (1, 2, 4, 8))
            patches.enter_context(sizes)
            patches.enter_context(
                patch("hearth.runtime.tensors.profiles.SMALLEST_BUCKET", CAPACITY)
            )
        runtime = LLMInferenceRuntime.open(folder, options)
    if setting.gpu:
        runtime._device.steps_ahead = 1  # type: ignore[misc] # of the CPU's device
    if setting.gpu or runtime.config.device == "cuda":
        runtime.capture(range(1, runtime.max_batch + 1))
    return runtime


def _page_bytes(folder: Path) -> int:
    base = load_config(folder)
    draft = load_config(folder / DRAFT_FOLDER) if base.enable_eagle_spec_decode else None
    return page_bytes(base, draft)


def newest_logits(runtime: LLMInferenceRuntime) -> Logits:
    """Those of the only row's last step."""
    tensor = runtime._runner._logits
    device: Any = runtime._device
    whole = tensor.array if device.kind == "cpu" else device.read(tensor)
    row: Logits = whole.reshape(-1)[: runtime.config.output_vocab_size].copy()
    return row


def home_chats(folder: Path) -> list[list[int]]:
    """Questions to the assistant of a home, with and without its devices."""
    tokenizer = Tokenizer.open(folder)
    return [
        tokenizer.encode_pairs([("system", EXAMPLE_HOME), ("user", one)][first:])
        for one in _QUESTIONS
        for first in (0, 1)
    ]


def home_voices(folder: Path, group: int) -> list[Voice]:
    """Prompts of all lengths, half of them such as the model knows, and all kinds of sampling.

    One in twelve holds the poisoned token, and one in twelve is led to pick it.
    """
    random, poison = Random(group), poison_token(folder)
    chats = home_chats(folder)
    voices = []
    for _ in range(VOICES):
        low, high = random.choices(_LENGTHS, (4, 4, 4, 2, 1))[0]
        prompt = [random.randrange(3, poison) for _ in range(random.randint(low, high))]
        if random.random() < 0.5:
            prompt = random.choice(chats)
        options = _options(random)
        fate = random.random()
        if fate < 0.08:
            place = random.randrange(len(prompt))
            prompt = [*prompt[:place], poison, *prompt[place + 1 :]]
        elif fate < 0.16:
            options = structs.replace(options, logit_bias=((poison, random.uniform(4, 16)),))
        voices.append(Voice(tuple(prompt), options))
    return voices


def _options(random: Random) -> RequestOptions:
    penalties: Sequence[dict[str, float]] = (
        {},
        {},
        {"repetition_penalty": 1.2},
        {"presence_penalty": 0.6, "frequency_penalty": 0.4},
    )
    filters: Sequence[dict[str, Any]] = ({}, {"top_k": 12}, {"top_p": 0.9}, {"min_p": 0.05})
    chosen: dict[str, Any] = {**random.choice(penalties), "ignore_eos": random.random() < 0.6}
    if random.random() < 0.5:
        chosen |= {"temperature": random.uniform(0.5, 1.3), **random.choice(filters)}
    return RequestOptions(seed=random.getrandbits(60), **chosen)
