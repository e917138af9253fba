"""What a join costs the draft: nothing, entries that wait are kept."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from random import Random
from statistics import fmean

import pytest

from runtime.decoding.runtime import LLMInferenceRuntime
from runtime.request import RequestOptions, RowRequest
from tests.runtime.decoding.schedules.home import (
    Method,
    Setting,
    export_home,
    home_chats,
    open_runtime,
)

TOKENS = 48
LEAST = 0.97


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_home(tmp_path_factory.mktemp("joins") / "home", 32)


def arriving(runtime: LLMInferenceRuntime, rows: Sequence[RowRequest], apart: float) -> float:
    """The accept length of rows that come at random, so many borders `apart` in the mean."""
    random, due = Random(1), 0.0
    waiting = []
    for row in rows:
        waiting.append((due, row))
        due += random.expovariate(1 / apart)
    accepted: list[int] = []
    border = 0
    while waiting or runtime.active:
        while waiting and waiting[0][0] <= border and runtime.free:
            runtime.admit([waiting.pop(0)[1]])
        if runtime.active:
            accepted += [one.accepted for one in runtime.step().rounds]
        border += 1
    return fmean(accepted)


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("method", ["eagle", "lookup"])
def test_joins_cost_no_accepted_tokens(folder: Path, method: Method, *, gpu: bool) -> None:
    options = RequestOptions(max_tokens=TOKENS)
    rows = [
        RowRequest(token_ids=list(chat), prompt_length=len(chat), options=options)
        for chat in home_chats(folder)
    ]
    with closing(open_runtime(folder, Setting(method, gpu=gpu))) as runtime:
        # One after the other.
        alone = arriving(runtime, rows, 10_000)
        for apart in (1, 6):
            assert arriving(runtime, rows, apart) >= LEAST * alone > LEAST
