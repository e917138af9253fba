"""Random schedules on the engines of one folder, each row beside itself alone.

`python -m tests.runtime.generation.schedules` runs as many as one likes.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import click
import msgspec

from hearth.runtime.config import load_config
from hearth.runtime.errors import HearthError
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from tests.runtime.generation.schedules.alone import Alone, Verdict, Voice, judge, run_alone
from tests.runtime.generation.schedules.home import (
    Setting,
    export_home,
    home_voices,
    near_tie_of,
    newest_logits,
    open_runtime,
    settings_of,
)
from tests.runtime.generation.schedules.schedule import Bounds, Choices, Schedule, draw_schedule
from tests.runtime.generation.schedules.trial import Reply, Trial, ViolationError, failing_steps

A_GROUP = 50
"""Schedules that share their prompts."""
ALONE = Setting(chunk=256)
_BYTES = 400
_TOKENS = 20
Folders = Callable[[int], Path]
"""Gives the folder of an engine by its prefill chunk."""


class Failure(msgspec.Struct, frozen=True):
    """A schedule that broke a promise, and how."""

    schedule: int
    setting: str
    what: str


class Figures(msgspec.Struct, kw_only=True):
    """What a campaign showed.

    `exact` counts the rows whose log probabilities had to be equal to the last bit, `placings` how
    often rows took places, `reused` the tokens that came from the prefix cache. `parted` counts the
    rows whose text parted at a near-tie, `largest_gap` is the lead that was lost there,
    `largest_deviation` that of a log probability before.
    """

    schedules: int = 0
    rows: int = 0
    exact: int = 0
    placings: int = 0
    reused: int = 0
    steps: int = 0
    tokens: int = 0
    near_tie: float = 0.0
    parted: int = 0
    largest_gap: float = 0.0
    largest_deviation: float = 0.0
    ends: dict[str, int] = {}
    failures: list[Failure] = []


class Campaign:
    """Runs schedules by their number, each on the setting whose turn it is.

    Rows alone run on an engine of their own, without speculation.
    """

    def __init__(
        self,
        folders: Folders,
        settings: Sequence[Setting],
    ) -> None:
        self._folders = folders
        self._settings = settings
        config = load_config(folders(ALONE.chunk))
        self._near_tie = near_tie_of(config)
        self._kernels = config.backend == "kernels"
        self._opened: dict[Setting, LLMInferenceRuntime] = {}
        self._voices: dict[int, list[Voice]] = {}
        self._alone: dict[tuple[int, int], Alone] = {}
        self.figures = Figures(near_tie=self._near_tie)

    def run(self, number: int) -> None:
        """Run a schedule and count it; what it breaks is among the failures."""
        setting = self._settings[number % len(self._settings)]
        schedule = draw_schedule(
            Choices(Random(number).randbytes(_BYTES)),
            Bounds(len(self._group(number // A_GROUP)), tokens=_TOKENS, whole=0.005),
        )
        try:
            self._run(number // A_GROUP, schedule, setting)
        except (ViolationError, HearthError) as error:
            self.figures.failures.append(Failure(number, setting.name, str(error)))
            self._close(setting)
        self.figures.schedules += 1

    def close(self) -> None:
        """Close all engines."""
        for setting in list(self._opened):
            self._close(setting)

    def _run(self, group: int, schedule: Schedule, setting: Setting) -> None:
        runtime = self._runtime(setting)
        voices = [self._group(group)[plan.voice] for plan in schedule.rows]
        plans = schedule.rows
        if setting.method == "off":
            plans = tuple(msgspec.structs.replace(plan, speculation=None) for plan in plans)
        requests = [voice.row(plan) for voice, plan in zip(voices, plans, strict=True)]
        ahead = runtime._device.steps_ahead
        # The nodes of a tree lie in other slots than the text would, and sums round differently,
        # but not those of kernels.
        near_tie = self._near_tie or (1e-4 if setting.tree and not self._kernels else 0.0)
        trial = Trial(runtime, schedule, requests, ahead)
        before = runtime.prefill_metrics.reused
        with failing_steps(runtime, schedule):
            replies = trial.run()
        self.figures.reused += runtime.prefill_metrics.reused - before
        for plan, request, reply in zip(plans, requests, replies, strict=True):
            longest = plan.tokens or runtime.capacity - request.prompt_length
            alone = self._row_alone(group, plan.voice, longest)
            verdict = judge(reply, request, longest, alone, near_tie)
            self._count(reply, verdict, exact=not near_tie)
        self.figures.steps += trial.steps

    def _count(self, reply: Reply, verdict: Verdict, *, exact: bool) -> None:
        figures = self.figures
        figures.rows += 1
        figures.exact += exact
        figures.placings += reply.placed
        figures.tokens += verdict.compared
        figures.parted += verdict.gap is not None
        figures.largest_gap = max(figures.largest_gap, verdict.gap or 0.0)
        figures.largest_deviation = max(figures.largest_deviation, verdict.deviation)
        figures.ends[reply.end] = figures.ends.get(reply.end, 0) + 1

    def _row_alone(self, group: int, voice: int, longest: int) -> Alone:
        known = self._alone.get((group, voice))
        if known is not None and (
            len(known.reply.tokens) >= longest or known.reply.end != "length"
        ):
            return known
        runtime = self._runtime(ALONE)
        # What is read behind a step is of that step.
        runtime._device.steps_ahead = 0  # type: ignore[misc] # of each device
        row = self._group(group)[voice]
        tokens = min(max(longest, _TOKENS), runtime.capacity - len(row.prompt))
        found = run_alone(runtime, row, tokens, lambda: newest_logits(runtime))
        self._alone[group, voice] = found
        return found

    def _group(self, group: int) -> list[Voice]:
        if group not in self._voices:
            # Every folder has the same tokenizer.
            self._voices[group] = home_voices(self._folders(self._settings[0].chunk), group)
        return self._voices[group]

    def _runtime(self, setting: Setting) -> LLMInferenceRuntime:
        if setting not in self._opened:
            folder = self._folders(setting.chunk)
            self._opened[setting] = open_runtime(folder, setting)
        return self._opened[setting]

    def _close(self, setting: Setting) -> None:
        runtime = self._opened.pop(setting, None)
        if runtime is not None:
            runtime.close()


EXPORTS: dict[str, dict[str, dict[str, Any]]] = {
    "cpu": {"native": {"dialect": "native"}, "classic": {"dialect": "classic"}},
    "cuda": {
        "kernels-float16": {"backend": "kernels", "device": "cuda", "dtype": "float16"},
        "kernels-bfloat16": {"backend": "kernels", "device": "cuda", "dtype": "bfloat16"},
        "float32": {"backend": "onnxruntime", "device": "cuda"},
        "float16": {"backend": "onnxruntime", "device": "cuda", "dtype": "float16"},
    },
}


@click.command()
@click.option("--count", default=50, show_default=True, help="Schedules for each engine.")
@click.option("--first", default=0, help="The number of the first schedule.")
@click.option("--engine", default="", metavar="DIR", help="An engine folder.  [the shipped model]")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on the output.")
def main(*, count: int, first: int, engine: str, device: str, as_json: bool) -> None:
    """Compare each row of random schedules with itself alone; exits with 1 where one differs."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, folders in _engines(engine, device, Path(scratch)).items():
            started = time.monotonic()
            figures = _figures(folders, range(first, first + count))
            found[name] = {**msgspec.to_builtins(figures), "seconds": time.monotonic() - started}
            click.echo(f"{name}: {count} schedules, {len(figures.failures)} failures", err=True)
    wanted = found if as_json else {name: one["failures"] for name, one in found.items()}
    click.echo(msgspec.json.format(msgspec.json.encode(wanted), indent=1))
    if any(one["failures"] for one in found.values()):
        sys.exit(1)


def _engines(engine: str, device: str, scratch: Path) -> dict[str, Folders]:
    """The folders of each engine, by the engine's name; one that is given has one chunk."""
    if engine:
        return {Path(engine).name: lambda _: Path(engine)}

    def exported(name: str) -> Folders:
        return cache(
            lambda chunk: export_home(scratch / f"{name}-{chunk}", chunk, **EXPORTS[device][name])
        )

    return {name: exported(name) for name in EXPORTS[device]}


def _figures(folders: Folders, numbers: Sequence[int]) -> Figures:
    campaign = Campaign(folders, settings_of(load_config(folders(ALONE.chunk))))
    try:
        for number in numbers:
            campaign.run(number)
    finally:
        campaign.close()
    return campaign.figures


if __name__ == "__main__":
    main()
