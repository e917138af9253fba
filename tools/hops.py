"""Count what one decode step costs in Python: frames from loop to launch, and calls of our own.

`python -m tools.hops [--json]` runs the shipped model on the CPU behind an executor's loop: one row
of greedy decoding, without speculation and prefix cache, in its steady state. Calls are counted by
`sys.setprofile`, each resumption of a generator as one; comprehensions are calls before Python 3.12
and none from there on.
"""

from __future__ import annotations

import argparse
import json
import threading
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import mode
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, NamedTuple

from onnxruntime import InferenceSession

from hearth.actors.executor.actor import ExecutorActor
from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.options import RuntimeOptions
from hearth.runtime.request import RequestOptions, RowRequest
from tests.actors.executor.harness import open_harness

ROOT = Path(__file__).parents[1]
_ROOMS = ("actors", "runtime")
_LOOP = ExecutorActor.run.__code__
_STEP = LLMInferenceRuntime.step.__code__
_LAUNCH = InferenceSession.run_with_iobinding.__code__
_PROMPT_TOKENS = 9
_TOKENS = 40


class Call(NamedTuple):
    """A function of our own, by its file in the repository."""

    file: str
    function: str


@cache
def own_file(name: str) -> str | None:
    """Path in the repository of a file of actors/ or runtime/; None for any other."""
    path = Path(name).resolve()
    own = any(path.is_relative_to(ROOT / room) for room in _ROOMS)
    return str(path.relative_to(ROOT)) if own else None


def call_of(frame: FrameType) -> Call | None:
    """Function that a frame runs; None where it is not of our own."""
    file = own_file(frame.f_code.co_filename)
    return None if file is None else Call(file, frame.f_code.co_name)


def frames_from_loop(top: FrameType | None) -> list[Call]:
    """Frames of our own from the executor's loop to `top`, the loop first; [] below no loop."""
    found: list[Call] = []
    while top is not None:
        if call := call_of(top):
            found.append(call)
        if top.f_code is _LOOP:
            return found[::-1]
        top = top.f_back
    return []


@dataclass
class Turn:
    """One turn of the executor's loop, from the beginning of a step to that of the next."""

    frames: list[Call] = field(default_factory=list)
    """Frames from the loop to the engine's launch."""
    step: list[Call] = field(default_factory=list)
    """Calls of `LLMInferenceRuntime.step`, itself included."""
    rest: list[Call] = field(default_factory=list)
    """Calls of the loop around the step: mail, bookkeeping, the answer."""


class TurnProfile:
    """Profile function that sorts the calls of a thread by turns of the executor's loop."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self._inside = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Note one event, as `sys.setprofile` gives them."""
        code = frame.f_code
        if code is _STEP and event in ("call", "return"):
            self._inside = event == "call"
            if self._inside:
                self.turns.append(Turn())
        if event != "call" or not self.turns:
            return
        turn = self.turns[-1]
        if code is _LAUNCH:
            turn.frames = frames_from_loop(frame.f_back)
        elif call := call_of(frame):
            (turn.step if self._inside else turn.rest).append(call)


def steady_turn(turns: list[Turn]) -> Turn:
    """First turn of those that have the most common number of calls."""
    calls = [len(turn.step) + len(turn.rest) for turn in turns]
    return turns[calls.index(mode(calls))]


def profile_turn(model: Path) -> Turn:
    """Turn of the steady state, of the model in this folder."""
    with TemporaryDirectory() as scratch:
        engine = Path(scratch) / "engine"
        export_model(model, engine, ExportOptions())
        runtime = LLMInferenceRuntime.open(engine, RuntimeOptions())
        runtime.capture([1])
        options = RequestOptions(max_tokens=_TOKENS, ignore_eos=True)
        prompt = list(range(5, 5 + _PROMPT_TOKENS))
        profile = TurnProfile()
        with open_harness(runtime) as harness:
            row = RowRequest(token_ids=prompt, prompt_length=len(prompt), options=options)
            harness.offer((1, row))
            threading.setprofile(profile)
            try:
                harness.start()
            finally:
                # It holds for threads that start later.
                threading.setprofile(None)
            harness.finish(1)
        runtime.close()
    turn = steady_turn(profile.turns)
    if not turn.frames:
        raise RuntimeError("no launch was seen below the executor's loop")
    return turn


def figures(turn: Turn) -> dict[str, int]:
    """Figures of a turn: `calls` and `files` of the step, `turn_*` with the loop around it."""
    whole = [*turn.step, *turn.rest]
    return {
        "frames": len(turn.frames),
        "frame_files": len({call.file for call in turn.frames}),
        "calls": len(turn.step),
        "files": len({call.file for call in turn.step}),
        "turn_calls": len(whole),
        "turn_files": len({call.file for call in whole}),
    }


def main() -> None:
    """Print the figures, and what was counted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args()
    turn = profile_turn(ROOT / "models" / "home")
    shown = {
        "frames": [f"{call.file} {call.function}" for call in turn.frames],
        "step": _counted(turn.step),
        "rest": _counted(turn.rest),
    }
    if given.json:
        print(json.dumps({"figures": figures(turn), "lists": shown}, indent=2))
        return
    for name, calls in shown.items():
        print(f"{name}:", *(f"  {call}" for call in calls), sep="\n")
    for name, value in figures(turn).items():
        print(f"{name:<12}{value:>5}")


def _counted(calls: list[Call]) -> list[str]:
    return [f"{times} {call.file} {call.function}" for call, times in Counter(calls).most_common()]


if __name__ == "__main__":
    main()
