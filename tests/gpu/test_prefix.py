"""The prefix cache on a GPU: what is reused changes nothing, and nobody waits for it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from hearth.daemon.shipped_files import EXAMPLE_HOME
from hearth.runtime.device.cuda.stream import CudaEvent, CudaStream
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.options import RuntimeOptions, SpeculationOptions
from hearth.runtime.request import RowRequest
from hearth.runtime.text.tokenizer import Tokenizer
from tests.gpu.near_ties import Reference, divergences, greedy_row, references

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
NEAR_TIE = 0.1
"""Lead, in log probability, that rounding to half precision may turn around."""
SIZES = {"device": (64 << 20, 0), "host": (1 << 20, 64 << 20)}
"""Bytes of device and of host memory: in the second case most pages come back from the host's."""
QUESTIONS = ("hello", "turn on the desk lamp", "list all devices", "good night", "tell me a story")
DRAFTED = ("kernels-eagle-fp16", "ort-eagle-fp16", "ort-chains-fp16", "tensorrt-eagle")


@pytest.fixture(scope="module", params=SIZES)
def runtime(gpu_engine: Path, request: pytest.FixtureRequest) -> Iterator[LLMInferenceRuntime]:
    """A runtime with a prefix cache and its decode steps captured."""
    device, host = SIZES[request.param]
    method = "eagle" if any(gpu_engine.name == one for one in DRAFTED) else "off"
    options = RuntimeOptions(
        max_batch=4,
        prefix_cache_bytes=device,
        prefix_host_bytes=host,
        speculation=SpeculationOptions(method=method, adaptive=False),  # type: ignore[arg-type] # one of both
    )
    opened = LLMInferenceRuntime.open(gpu_engine, options)
    opened.capture(range(1, 5))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def rows(cpu_engine: Path) -> list[RowRequest]:
    tokenizer = Tokenizer.open(cpu_engine)
    prompts = [
        tokenizer.encode_pairs([("system", EXAMPLE_HOME), ("user", one)]) for one in QUESTIONS
    ]
    return [greedy_row(prompt, 40, ignore_eos=True) for prompt in prompts]


def unaided(row: RowRequest) -> RowRequest:
    return structs.replace(row, options=structs.replace(row.options, cache="bypass"))


def said(runtime: LLMInferenceRuntime, rows: list[RowRequest]) -> list[Reference]:
    """What rows say one after the other, so that each finds what those before have left."""
    return [one for row in rows for one in references(runtime, [row])]


def test_rows_that_begin_alike_say_what_they_say_without_the_cache(
    runtime: LLMInferenceRuntime, rows: list[RowRequest]
) -> None:
    wanted = said(runtime, [unaided(row) for row in rows])
    for together in (said, references):
        reused = runtime.prefill_metrics.reused
        given = [one.tokens for one in together(runtime, rows)]
        parted = divergences(given, wanted)
        print("divergences", parted)  # noqa: T201 - reported with the figures of the run
        assert [one for one in parted if one.lead >= NEAR_TIE] == []
        assert runtime.prefill_metrics.reused > reused


def test_a_conversation_goes_on_from_what_was_said(
    runtime: LLMInferenceRuntime, rows: list[RowRequest]
) -> None:
    token_ids = list(rows[0].token_ids)
    for _ in range(4):
        row = greedy_row(token_ids, 20, ignore_eos=True)
        (plain,), (helped,) = said(runtime, [unaided(row)]), said(runtime, [row])
        parted = divergences([helped.tokens], [plain])
        assert [one for one in parted if one.lead >= NEAR_TIE] == []
        token_ids += [*helped.tokens, *range(40, 50)]


def test_neither_saving_nor_loading_waits_for_the_device(
    runtime: LLMInferenceRuntime, rows: list[RowRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    wait, wait_from = CudaEvent.wait, CudaEvent.wait_from
    synchronize = CudaStream.synchronize

    def note_wait(event: CudaEvent) -> None:
        calls.append("wait")
        wait(event)

    def note_wait_from(event: CudaEvent, expected: float) -> bool:
        """A round's end counts once, whether or not it was looked for too long and waited for."""
        before = len(calls)
        ahead = wait_from(event, expected)
        calls[before:] = ["round"]
        return ahead

    def note_synchronize(stream: CudaStream) -> None:
        calls.append("synchronize")
        synchronize(stream)

    def counted(row: RowRequest) -> int:
        calls.clear()
        references(runtime, [row])
        return len(calls)

    monkeypatch.setattr(CudaEvent, "wait", note_wait)
    monkeypatch.setattr(CudaEvent, "wait_from", note_wait_from)
    monkeypatch.setattr(CudaStream, "synchronize", note_synchronize)
    with_cache = [counted(row) for row in (rows[1], rows[1])]
    without = [counted(unaided(row)) for row in (rows[1], rows[1])]
    assert max(with_cache) <= min(without)
