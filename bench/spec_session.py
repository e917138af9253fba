"""The engines of `bench spec`, opened when a case first needs them, and the cases run on them."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from bench.spec import Progress, SpecContest, SpecFigures
from bench.spec_cases import VERIFY_BATCHES, SpecCase, shape_name, verified_shapes
from bench.spec_mixed import MixedFigures, measure_mixed
from bench.spec_prompts import encode_prompts, held_out_prompts
from bench.spec_verify import NEAR_TIE, Replies, VerifyFigures, compare, replies
from daemon.cli.console import progress_bar
from runtime.config import load_config
from runtime.decoding.deployment import Method
from runtime.decoding.runtime import LLMInferenceRuntime
from runtime.options import EagleDraftingConfig, RuntimeOptions, SpeculationOptions
from runtime.text import Tokenizer

_OFF = SpeculationOptions()


class SpecChoice(msgspec.Struct, frozen=True, kw_only=True):
    """What the caller chose; `plain` is the folder whose vanilla decoding is compared with."""

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
        self._prompts = prompts
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
            show: Progress = lambda done, total: progress(case.name, done, total)  # noqa: E731
            return self._mixed(case, show) if case.kind == "mixed" else self._contest(case, show)

    def verify(self, sizes: Sequence[int] = VERIFY_BATCHES) -> dict[str, VerifyFigures]:
        """Compare greedy replies by method, tree shape and batch size."""
        found: dict[str, VerifyFigures] = {}
        for batch in sizes:
            vanilla = self._replies(f"vanilla/b{batch}", _OFF, batch, self._choice.plain)
            for name, options in self._verified_methods():
                key = f"{name}/b{batch}"
                ours = self._replies(key, options, batch)
                found[key] = compare(ours, vanilla, self._near_tie)
        return found

    @property
    def has_draft(self) -> bool:
        """Whether the engine folder holds a draft."""
        return load_config(self._choice.engine).enable_eagle_spec_decode

    @property
    def _near_tie(self) -> float:
        return NEAR_TIE[load_config(self._choice.engine).dtype]

    def _verified_methods(self) -> list[tuple[str, SpeculationOptions]]:
        found = [("lookup", SpeculationOptions(method="lookup", adaptive=False))]
        shape = self._choice.shape
        asked = (shape,) if shape else verified_shapes(load_config(self._choice.engine))
        for one in asked if self.has_draft else ():
            options = SpeculationOptions(method="eagle", eagle=one, adaptive=False)
            found.append((shape_name(one), options))
        return found

    def _contest(self, case: SpecCase, show: Progress) -> SpecFigures:
        choice = self._choice
        method: Method = "lookup" if case.kind == "lookup" else "eagle"
        speculating = self._runtime(SpeculationOptions(method=method, eagle=choice.shape))
        contest = SpecContest(
            self._runtime(_OFF, choice.plain), speculating, self._prompts, choice.max_tokens
        )
        return contest.measure(case.batch, choice.repeats, show)

    def _mixed(self, case: SpecCase, show: Progress) -> MixedFigures:
        method: Method = "eagle" if self.has_draft else "lookup"
        options = SpeculationOptions(method=method, eagle=self._choice.shape, adaptive=False)
        return measure_mixed(
            self._runtime(options),
            self._prompts,
            case.batch,
            max_tokens=self._choice.max_tokens,
            repeats=self._choice.repeats,
            progress=show,
        )

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
