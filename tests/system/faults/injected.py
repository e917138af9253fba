"""Faults inside a daemon's processes: what its `sitecustomize` imports where a row asks for them.

A file in the folder `$BENCH_FAULTS` asks for the fault of its name: `out_of_memory` and `shape` for
one step of the engine, `capture` for all captures, `text` for prompts that hold the word "fault".
"""

import os
from pathlib import Path
from typing import Any, cast

from hearth.runtime.device.device import Stream
from hearth.runtime.errors import HearthError
from hearth.runtime.executor.engine import Engine
from hearth.runtime.executor.engine_executor import EngineExecutor
from hearth.runtime.text.tokenizer import Tokenizer

VARIABLE = "BENCH_FAULTS"


class _CannotCapture:
    """An engine whose steps work and cannot be captured."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def capture(self, *_: object) -> None:
        raise HearthError("internal", "the bench lets every capture fail")


def inject(asked: Path) -> None:
    """Let this process meet the faults that files in `asked` name."""
    execute, capture_graph, encode = (
        EngineExecutor.execute,
        EngineExecutor.capture_graph,
        Tokenizer.encode,
    )

    def failing_execute(self: EngineExecutor, stream: Stream) -> bool:
        if _taken(asked / "out_of_memory"):
            raise HearthError("out_of_memory", "the bench lets a step find no memory")
        if _taken(asked / "shape"):
            raise ValueError("the bench lets a step meet a shape that does not fit")
        return execute(self, stream)

    def failing_capture(self: EngineExecutor, stream: Stream) -> None:
        if not (asked / "capture").exists():
            capture_graph(self, stream)
            return
        engine = self._engine
        self._engine = cast("Engine", _CannotCapture(engine))
        try:
            capture_graph(self, stream)
        finally:
            self._engine = engine

    def failing_encode(
        self: Tokenizer, text: str, field: str = "prompt", most: int | None = None
    ) -> list[int]:
        if "fault" in text and (asked / "text").exists():
            raise RuntimeError("the bench lets a text fail")
        return encode(self, text, field, most)

    EngineExecutor.execute = failing_execute  # type: ignore[method-assign]  # what it is for
    EngineExecutor.capture_graph = failing_capture  # type: ignore[method-assign]
    Tokenizer.encode = failing_encode  # type: ignore[method-assign]


def _taken(file: Path) -> bool:
    """Take a fault that is asked for; False where it is not."""
    if not file.exists():
        return False
    file.unlink()
    return True


if VARIABLE in os.environ:
    inject(Path(os.environ[VARIABLE]))
