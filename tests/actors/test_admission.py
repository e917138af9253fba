from __future__ import annotations

import pytest
from msgspec import structs

from hearth.actors.messages import ExecutorLimits
from hearth.actors.scheduler.admission import Refusal, queue_refusal, size_refusal, within_share
from hearth.actors.settings import PolicySettings
from hearth.runtime.errors import CODES
from tests.actors.simulation import entry

LIMITS = ExecutorLimits(max_batch=2, max_prompt_tokens=50, max_total_tokens=100)
SETTINGS = PolicySettings(queue_requests=3, queue_tokens=60)


def check(refusal: Refusal | None, code: str, field: str) -> None:
    assert refusal is not None
    assert (refusal.code, refusal.field) == (code, field)
    assert refusal.code in CODES


def test_the_queue_refuses_by_requests() -> None:
    assert queue_refusal(entry(9), 2, 2, 0, SETTINGS) is None
    check(queue_refusal(entry(9), 3, 3, 0, SETTINGS), "queue_full", "queue_requests")


def test_the_queue_refuses_by_prompt_tokens_and_still_takes_short_ones() -> None:
    assert queue_refusal(entry(9, prompt=20), 1, 40, 0, SETTINGS) is None
    check(queue_refusal(entry(9, prompt=21), 1, 40, 0, SETTINGS), "queue_full", "queue_tokens")


def test_a_refusal_by_tokens_says_how_many_have_to_go_before() -> None:
    for prompt, ahead in ((21, 1), (40, 1), (41, 2), (60, 2)):
        refusal = queue_refusal(entry(9, prompt=prompt), 2, 40, 0, SETTINGS)
        assert refusal is not None
        assert refusal.ahead == ahead


def test_one_client_leaves_room_for_the_prompt_of_another() -> None:
    assert queue_refusal(entry(9, prompt=15), 2, 30, 30, SETTINGS) is None
    refusal = queue_refusal(entry(9, prompt=16), 2, 30, 30, SETTINGS)
    check(refusal, "too_many_requests", "client_queue_share")
    assert queue_refusal(entry(9, prompt=30), 2, 30, 0, SETTINGS) is None


@pytest.mark.parametrize("clients", [1, 2, 5, 20])
def test_however_many_clients_flood_there_is_room_for_the_first_request_of_another(
    clients: int,
) -> None:
    limit, share = 256, 0.75
    waiting = [0] * clients
    for _ in range(limit):
        for client in range(clients):
            if sum(waiting) < limit and within_share(
                waiting[client], 1, sum(waiting), limit, share
            ):
                waiting[client] += 1
    assert sum(waiting) < limit
    assert max(waiting) - min(waiting) <= 1
    if clients == 1:
        assert waiting == [192]


def test_whoever_has_the_whole_queue_for_its_share_is_not_held_back() -> None:
    assert within_share(255, 1, 255, 256, share=1.0)


@pytest.mark.parametrize(
    ("prompt", "tokens", "code", "field"),
    [
        (0, 1, "prompt_empty", "prompt"),
        (51, 1, "prompt_too_long", "prompt"),
        (50, 51, "capacity_exceeded", "max_tokens"),
    ],
)
def test_the_executor_s_limits_refuse(prompt: int, tokens: int, code: str, field: str) -> None:
    request = entry(1, prompt=prompt, tokens=tokens)
    check(size_refusal(request, SETTINGS, LIMITS), code, field)


def test_exactly_the_limits_are_taken() -> None:
    assert size_refusal(entry(1, prompt=50, tokens=50), SETTINGS, LIMITS) is None
    assert size_refusal(entry(1, prompt=1, tokens=99), SETTINGS, LIMITS) is None


def test_a_prompt_that_could_never_wait_is_too_long() -> None:
    settings = PolicySettings(queue_tokens=9)
    assert size_refusal(entry(1, prompt=9), settings, None) is None
    check(size_refusal(entry(1, prompt=10), settings, None), "prompt_too_long", "prompt")


def test_the_message_says_what_would_fit() -> None:
    refusal = size_refusal(entry(1, prompt=30, tokens=80), SETTINGS, LIMITS)
    assert refusal is not None
    assert refusal.message.endswith("ask for at most 70")


def test_without_max_tokens_one_token_has_to_fit() -> None:
    whole = structs.replace(LIMITS, max_prompt_tokens=100)
    settings = PolicySettings(queue_tokens=1000)
    for prompt, fits in ((99, True), (100, False)):
        waiting = entry(1, prompt=prompt, tokens=None)
        refusal = size_refusal(waiting, settings, whole)
        assert (refusal is None) is fits
