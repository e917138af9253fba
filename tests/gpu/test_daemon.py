"""The daemon with its executor on a GPU: several clients at once against the CPU."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hearth.daemon.own_daemon import own_daemon
from hearth.daemon.shipped_files import EXAMPLE_HOME
from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.text import Tokenizer
from hearth_client import Client
from tests.gpu.near_ties import divergences, greedy_row, references
from tests.gpu.test_engines import NEAR_TIE, QUESTIONS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

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
            tokenizer.encode_chat([(turn["role"], turn["content"]) for turn in turns]), MAX_TOKENS
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
