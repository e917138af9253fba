"""The cases of `bench spec`, and the engines that they run on, each opened when one needs it."""

import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from bench.spec.contest import MixedFigures, Progress, SpecFigures, measure_contest, measure_mixed
from bench.spec.verify import NEAR_TIE, Replies, VerifyFigures, compare, replies
from daemon.cli.console import progress_bar
from daemon.shipped import SOURCE
from runtime.config import LLMEngineRunnerConfig, load_config
from runtime.decoding.deployment import Method
from runtime.decoding.runtime import LLMInferenceRuntime
from runtime.errors import HearthError
from runtime.options import EagleDraftingConfig, RuntimeOptions, SpeculationOptions
from runtime.text import Tokenizer

PREFIXES = ("cpu", "kernels", "ort-cuda", "tensorrt")
VERIFY_BATCHES = (1, 3, 8)
VERIFY_SHAPES = tuple(
    EagleDraftingConfig(drafting_top_k=top_k, drafting_step=step, verify_tree_size=nodes)
    for top_k, step, nodes in ((10, 6, 60), (4, 3, 16), (1, 4, 5), (8, 1, 9))
)
_EAGLE_BATCHES, _LOOKUP_BATCHES, _MIXED_BATCH = (1, 2, 4, 8), (1, 8), 8
_OFF = SpeculationOptions()


class SpecCase(NamedTuple):
    """A case; `mixed` times steps in which half of the rows speculate."""

    name: str
    kind: Literal["eagle", "lookup", "mixed"]
    batch: int


def spec_cases(prefix: str) -> dict[str, SpecCase]:
    """The cases of an engine, by name; those of a draft are named after what runs it."""
    found = [SpecCase(f"{prefix}/b{batch}", "eagle", batch) for batch in _EAGLE_BATCHES]
    found += [SpecCase(f"lookup/b{batch}", "lookup", batch) for batch in _LOOKUP_BATCHES]
    found.append(SpecCase(f"mixed/b{_MIXED_BATCH}", "mixed", _MIXED_BATCH))
    return {case.name: case for case in found}


ALL_CASES = tuple(dict.fromkeys(name for prefix in PREFIXES for name in spec_cases(prefix)))


def prefix_of(config: LLMEngineRunnerConfig) -> str:
    """Name of the cases of this engine's draft."""
    if config.device == "cpu":
        return "cpu"
    return "ort-cuda" if config.backend == "onnxruntime" else config.backend


def verified_shapes(config: LLMEngineRunnerConfig) -> tuple[EagleDraftingConfig, ...]:
    """The shapes that a base engine with a draft takes."""
    return tuple(
        shape for shape in VERIFY_SHAPES if shape.drafting_top_k == 1 or not config.chains_only
    )


def shape_name(shape: EagleDraftingConfig) -> str:
    """Top-k, steps and nodes: `10-6-60`."""
    return f"{shape.drafting_top_k}-{shape.drafting_step}-{shape.verify_tree_size}"


class SpecChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Choices of the caller; `plain` is the folder whose vanilla decoding is compared with."""

    engine: Path
    plain: Path
    shape: EagleDraftingConfig | None = None
    threads: int = 0
    prompts: int = 96
    max_tokens: int = 128
    repeats: int = 3


class SpecSession:
    """Runs cases, each prompt as token ids; `close` closes the engines."""

    def __init__(self, choice: SpecChoice, prompts: Sequence[list[int]]) -> None:
        self._choice = choice
        self._config = load_config(choice.engine)
        self._prompts = prompts
        self._sizes = {"max_tokens": choice.max_tokens, "repeats": choice.repeats}
        self._opened = ExitStack()
        self._runtimes: dict[tuple[Path, SpeculationOptions], LLMInferenceRuntime] = {}

    @classmethod
    def open(cls, choice: SpecChoice) -> "SpecSession":
        """A session on the held-out prompts."""
        tokenizer = Tokenizer.open(choice.engine)
        return cls(choice, encode_prompts(held_out_prompts(choice.prompts), tokenizer))

    def close(self) -> None:
        """Close all engines."""
        self._opened.close()

    def figures(self, case: SpecCase) -> SpecFigures | MixedFigures:
        """Measure a case; raises `invalid_value` where the engine is too small for it."""
        with progress_bar() as progress:
            show: Progress = partial(progress, case.name)
            return self._mixed(case, show) if case.kind == "mixed" else self._contest(case, show)

    def verify(self, sizes: Sequence[int] = VERIFY_BATCHES) -> dict[str, VerifyFigures]:
        """Compare greedy replies by method, tree shape and batch size."""
        methods = {"lookup": SpeculationOptions(method="lookup", adaptive=False)}
        if self._config.enable_eagle_spec_decode:
            shape = self._choice.shape
            for one in (shape,) if shape else verified_shapes(self._config):
                options = SpeculationOptions(method="eagle", eagle=one, adaptive=False)
                methods[shape_name(one)] = options
        found: dict[str, VerifyFigures] = {}
        for batch in sizes:
            vanilla = self._replies(f"vanilla/b{batch}", _OFF, batch, self._choice.plain)
            for name, options in methods.items():
                key = f"{name}/b{batch}"
                ours = self._replies(key, options, batch)
                found[key] = compare(ours, vanilla, NEAR_TIE[self._config.dtype])
        return found

    def _contest(self, case: SpecCase, show: Progress) -> SpecFigures:
        method: Method = "lookup" if case.kind == "lookup" else "eagle"
        speculating = self._runtime(SpeculationOptions(method=method, eagle=self._choice.shape))
        ways = self._runtime(_OFF, self._choice.plain), speculating
        found = measure_contest(ways, self._prompts, case.batch, progress=show, **self._sizes)
        return msgspec.structs.replace(found, dtype=self._config.dtype)

    def _mixed(self, case: SpecCase, show: Progress) -> MixedFigures:
        method: Method = "eagle" if self._config.enable_eagle_spec_decode else "lookup"
        options = SpeculationOptions(method=method, eagle=self._choice.shape, adaptive=False)
        runtime = self._runtime(options)
        return measure_mixed(runtime, self._prompts, case.batch, progress=show, **self._sizes)

    def _replies(
        self, name: str, options: SpeculationOptions, batch: int, folder: Path | None = None
    ) -> Replies:
        groups = -(-len(self._prompts) // batch)
        with progress_bar() as progress:
            ticks = iter(range(1, groups + 1))
            return replies(
                self._runtime(options, folder),
                self._prompts,
                batch,
                max_tokens=self._choice.max_tokens,
                logprobs=options.method == "off",
                tick=lambda: progress(name, next(ticks), groups),
            )

    def _runtime(
        self, speculation: SpeculationOptions, folder: Path | None = None
    ) -> LLMInferenceRuntime:
        key = folder or self._choice.engine, speculation
        if key not in self._runtimes:
            options = RuntimeOptions(
                threads=self._choice.threads, verify=False, speculation=speculation
            )
            runtime = LLMInferenceRuntime.open(key[0], options)
            self._opened.callback(runtime.close)
            runtime.capture(range(1, runtime.max_batch + 1))
            self._runtimes[key] = runtime
        return self._runtimes[key]


_PROGRAM = ("-m", "models.prompts")


class Turn(msgspec.Struct, frozen=True):
    """One turn of a conversation."""

    role: str
    content: str


class Prompt(msgspec.Struct, frozen=True):
    """A conversation that ends with a question, and the kind of question."""

    group: str
    messages: list[Turn]


def held_out_prompts(count: int) -> list[Prompt]:
    """`count` prompts, spread evenly over all that are held out; raises `invalid_value`.

    They are made by the program that makes the training data, which lies beside the shipped model.
    """
    command, folder = [sys.executable, *_PROGRAM], SOURCE.parents[1]
    try:
        done = subprocess.run(command, capture_output=True, check=True, cwd=folder)  # noqa: S603 - fixed
    except (OSError, subprocess.CalledProcessError) as error:
        raise HearthError(
            "invalid_value", f"there are no prompts at {SOURCE.parent}: run it in the repository"
        ) from error
    return spread(msgspec.json.Decoder(Prompt).decode_lines(done.stdout), count)


def spread(prompts: list[Prompt], count: int) -> list[Prompt]:
    """`count` of the prompts at even distances; all of them where there are fewer."""
    count = min(count, len(prompts))
    return [prompts[place * len(prompts) // count] for place in range(count)]


def encode_prompts(prompts: list[Prompt], tokenizer: Tokenizer) -> list[list[int]]:
    """The token ids of each prompt with the chat template."""
    return [
        tokenizer.encode_chat([(turn.role, turn.content) for turn in prompt.messages])
        for prompt in prompts
    ]
