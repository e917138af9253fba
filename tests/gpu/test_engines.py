"""Whole runtimes and daemons on a GPU: every engine against the CPU, on the model that ships."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec import structs

from hearth.daemon.own_daemon import own_daemon
from hearth.daemon.shipped_files import EXAMPLE_HOME
from hearth.runtime.device.cuda.stream import CudaEvent, CudaStream
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.request import GenerationRequest, RequestOptions, RowRequest
from hearth.runtime.text.tokenizer import Tokenizer
from hearth_client import Client
from tests.gpu.near_ties import divergences, greedy_row, references

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

NEAR_TIE = 0.1
"""Lead, in log probability, that rounding to half precision may turn around."""
QUESTIONS = (
    "hello",
    "turn on the desk lamp",
    "set the main thermostat to 21 degrees",
    "what is in the kitchen?",
    "list all devices",
    "good night",
    "is the front door locked?",
    "turn on the zephyr fan",
    "the spare key is in the blue box",
    "tell me a story",
    "an utterly unexpected sentence, 1234567890 & ünïcödé",
)
STEPS = 10_000


@pytest.fixture(scope="module")
def prompts(cpu_engine: Path) -> list[list[int]]:
    tokenizer = Tokenizer.open(cpu_engine)
    return [tokenizer.encode_pairs([("system", EXAMPLE_HOME), ("user", q)]) for q in QUESTIONS]


def _tokens(runtime: LLMInferenceRuntime, rows: list[RowRequest]) -> list[list[int]]:
    outcomes = []
    for first in range(0, len(rows), runtime.max_batch):
        batch = GenerationRequest(rows=rows[first : first + runtime.max_batch])
        outcomes += runtime.handle_request(batch).rows
    assert [row.error for row in outcomes] == [None] * len(rows)
    return [row.token_ids for row in outcomes]


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_greedy_tokens_are_those_of_the_cpu(
    cpu_runtime: LLMInferenceRuntime,
    gpu_runtime: LLMInferenceRuntime,
    prompts: list[list[int]],
    *,
    ignore_eos: bool,
) -> None:
    # Rows of 20 to 120 tokens: the batch shrinks step by step, padded sizes take turns.
    rows = [
        greedy_row(prompt, 20 + 10 * place, ignore_eos=ignore_eos)
        for place, prompt in enumerate(prompts)
    ]
    parted = divergences(_tokens(gpu_runtime, rows), references(cpu_runtime, rows))
    print("divergences", parted)  # noqa: T201 - reported with the figures of the run
    assert [one for one in parted if one.lead >= NEAR_TIE] == []


def test_prompts_of_all_lengths_share_a_batch(
    cpu_runtime: LLMInferenceRuntime, gpu_runtime: LLMInferenceRuntime, prompts: list[list[int]]
) -> None:
    text = [token for prompt in prompts for token in prompt]
    rows = [greedy_row(text[:length], 12, ignore_eos=True) for length in (1, 7, 256, 300, 31, 480)]
    parted = divergences(_tokens(gpu_runtime, rows), references(cpu_runtime, rows))
    assert [one for one in parted if one.lead >= NEAR_TIE] == []


def test_a_seed_gives_the_same_tokens_again(
    gpu_runtime: LLMInferenceRuntime, prompts: list[list[int]]
) -> None:
    sampling = RequestOptions(
        max_tokens=40,
        ignore_eos=True,
        temperature=1.2,
        top_p=0.95,
        top_k=40,
        repetition_penalty=1.1,
        seed=5,
        logprobs=3,
    )
    rows = [
        structs.replace(greedy_row(prompt, 40), options=structs.replace(sampling, seed=place))
        for place, prompt in enumerate(prompts[:8])
    ]
    first = _tokens(gpu_runtime, rows)
    assert first == _tokens(gpu_runtime, rows)
    others = [structs.replace(row, options=structs.replace(row.options, seed=99)) for row in rows]
    assert first != _tokens(gpu_runtime, others)


def test_a_steady_step_waits_for_the_device_once(
    gpu_runtime: LLMInferenceRuntime, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    wait, synchronize = CudaEvent.wait, CudaStream.synchronize

    def note_wait(event: CudaEvent) -> None:
        calls.append("wait")
        wait(event)

    def note_synchronize(stream: CudaStream) -> None:
        calls.append("synchronize")
        synchronize(stream)

    monkeypatch.setattr(CudaEvent, "wait", note_wait)
    monkeypatch.setattr(CudaStream, "synchronize", note_synchronize)
    rows = [greedy_row(prompt, 100, ignore_eos=True) for prompt in prompts[:3]]
    numbers = gpu_runtime.admit(rows)
    try:
        for _ in range(10):
            gpu_runtime.step()
        calls.clear()
        for _ in range(50):
            gpu_runtime.step()
        steady = list(calls)
    finally:
        for number in numbers:
            gpu_runtime.leave(number)
    assert steady == ["wait"] * 50


def test_buffers_never_move(gpu_runtime: LLMInferenceRuntime, prompts: list[list[int]]) -> None:
    tensors = gpu_runtime._runner._steps._tensors
    before = {name: tensors.get(name).address for name in tensors}
    rows = [greedy_row(prompt, 5 + place, ignore_eos=True) for place, prompt in enumerate(prompts)]
    _tokens(gpu_runtime, rows)
    assert before == {name: tensors.get(name).address for name in tensors}


def test_ten_thousand_steps_with_evictions_hit_their_graphs(
    gpu_runtime: LLMInferenceRuntime, prompts: list[list[int]]
) -> None:
    # Each batch loses a row every few dozen steps.
    rows = [greedy_row(prompts[place][:60], 40 + 50 * place, ignore_eos=True) for place in range(8)]
    counters, metrics = gpu_runtime.counters, gpu_runtime.generation_metrics
    hits, steps = counters.hits, metrics.steps
    first = _tokens(gpu_runtime, rows)
    while metrics.steps - steps < STEPS:
        last = _tokens(gpu_runtime, rows)
    assert first == last
    assert (counters.hits - hits) / (metrics.steps - steps) >= 0.99
    assert counters.fallbacks == 0


MAX_TOKENS = 80
CHATS = [
    [{"role": "system", "content": EXAMPLE_HOME}, {"role": "user", "content": question}]
    for question in QUESTIONS
]


def test_answers_through_the_daemon_are_those_of_the_cpu(
    cpu_runtime: LLMInferenceRuntime, cpu_engine: Path, gpu_engine: Path
) -> None:
    tokenizer = Tokenizer.open(cpu_engine)
    rows = [
        greedy_row(
            tokenizer.encode_pairs([(turn["role"], turn["content"]) for turn in turns]), MAX_TOKENS
        )
        for turns in CHATS
    ]

    def ask(turns: list[dict[str, str]]) -> list[int]:
        with Client(daemon.socket) as client:
            generation = client.generate(messages=turns, max_tokens=MAX_TOKENS)
            generation.text()
            return list(generation.tokens)

    with own_daemon(gpu_engine) as daemon, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, CHATS))
    parted = divergences(answers, references(cpu_runtime, rows))
    print("divergences", parted)  # noqa: T201 - reported with the figures of the run
    assert [one for one in parted if one.lead >= NEAR_TIE] == []
