"""Properties of the policy over random traffic, of text and of images."""

from __future__ import annotations

from typing import Literal

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hearth.actors.settings import PolicySettings
from tests.actors.scheduler.image_simulation import BROKEN, ImageSimulation
from tests.actors.scheduler.images import submit_images, work
from tests.actors.scheduler.simulation import LIMITS, Simulation, submit

REQUESTS = st.lists(
    st.tuples(
        st.floats(0, 5),  # arrival
        st.integers(0, 60),  # prompt
        st.integers(1, 80),  # tokens
        st.integers(-10, 10),  # priority
        st.integers(0, 3),  # client
        st.none() | st.floats(0, 4),  # deadline after arrival
        st.none() | st.floats(0, 4),  # cancelled after arrival
        st.sampled_from(["", "", "a", "b"]),  # adapter
    ),
    max_size=60,
)


@settings(max_examples=120, deadline=None)
@given(
    requests=REQUESTS,
    rows=st.integers(1, 4),
    batching=st.sampled_from(["joining", "synchronous"]),
    hold_s=st.floats(0.01, 1),
    queue_requests=st.integers(1, 20),
    queue_tokens=st.integers(20, 300),
    losses=st.lists(st.floats(0, 6), max_size=2),
    lag_s=st.sampled_from([0.0, 0.001, 0.03]),
)
def test_nothing_is_lost_or_doubled(
    *,
    requests: list[tuple[float, int, int, int, int, float | None, float | None, str]],
    rows: int,
    batching: Literal["joining", "synchronous"],
    hold_s: float,
    queue_requests: int,
    queue_tokens: int,
    losses: list[float],
    lag_s: float,
) -> None:
    """Every request ends exactly once, with exactly its tokens; the simulation checks limits."""
    simulation = Simulation(
        PolicySettings(
            batching=batching,
            hold_s=hold_s,
            queue_requests=queue_requests,
            queue_tokens=queue_tokens,
            ageing_s=0.5,
        ),
        limits=msgspec.structs.replace(
            LIMITS, max_batch=rows, max_prompt_tokens=50, max_total_tokens=100
        ),
        prefill_s_per_token=0.0005,
        lag_s=lag_s,
    )
    for rid, (arrival, prompt, tokens, priority, client, deadline, gone, adapter) in enumerate(
        requests
    ):
        due = None if deadline is None else arrival + deadline
        request = submit(
            rid,
            prompt=prompt,
            tokens=tokens,
            priority=priority,
            deadline=due,
            client=client,
            adapter=adapter,
        )
        simulation.arrive(arrival, request)
        if gone is not None:
            simulation.cancel(arrival + gone, rid)
    for lost in losses:
        simulation.lose(lost, lost + 0.3)
    simulation.run()
    for rid, (_, prompt, tokens, *_rest) in enumerate(requests):
        outcome = simulation.outcomes[rid]
        assert len(outcome.ends) == 1
        assert len(outcome.accepted) <= 1
        if outcome.ends == ["done"]:
            assert len(outcome.tokens) == tokens
            assert outcome.accepted
        if prompt > 50:
            assert outcome.ends[0] in ("prompt_too_long", "cancelled")
    load = simulation.policy.report(0)
    assert (load.running, load.queued, load.queued_tokens) == (0, 0, 0)
    assert not len(simulation.policy._running)


NAMES = ["cat", "dog", "owl", "elk", BROKEN]
IMAGE_REQUESTS = st.lists(
    st.tuples(
        st.floats(0, 3),  # arrival
        st.lists(st.sampled_from(NAMES), max_size=3),  # pictures
        st.integers(-10, 10),  # priority
        st.integers(0, 3),  # client
        st.none() | st.floats(0, 3),  # deadline after arrival
        st.none() | st.floats(0, 3),  # cancelled after arrival
    ),
    max_size=30,
)
LOSSES = st.lists(st.floats(0, 4), max_size=2)


@example(
    requests=[(0.0, ["cat"], 0, 0, None, None)],
    rows=1,
    encode_s=0.25,
    gpu=False,
    room=(1, 1),
    # The second executor has said of a row what the policy hears behind the third one's start.
    losses=[0.0, 0.09375],
    encoder_losses=[],
    lag_s=0.03,
)
@settings(max_examples=80, deadline=None)
@given(
    requests=IMAGE_REQUESTS,
    rows=st.integers(1, 3),
    encode_s=st.floats(0, 0.5),
    gpu=st.booleans(),
    room=st.tuples(st.integers(1, 5), st.integers(1, 6)),
    losses=LOSSES,
    encoder_losses=LOSSES,
    lag_s=st.sampled_from([0.0, 0.03]),
)
def test_nothing_is_lost_or_doubled_and_all_memory_comes_back(
    *,
    requests: list[tuple[float, list[str], int, int, float | None, float | None]],
    rows: int,
    encode_s: float,
    gpu: bool,
    room: tuple[int, int],
    losses: list[float],
    encoder_losses: list[float],
    lag_s: float,
) -> None:
    """Every request ends exactly once; the simulation looks that no memory has two writers."""
    simulation = ImageSimulation(
        PolicySettings(hold_s=0.1, ageing_s=0.5),
        encode_s=encode_s,
        gpu=gpu,
        patches=room[0],
        embeddings=room[1],
        broken=frozenset([work(BROKEN).key]),
        limits=msgspec.structs.replace(LIMITS, max_batch=rows),
        prefill_s_per_token=0.0005,
        lag_s=lag_s,
    )
    for rid, (arrival, names, priority, client, deadline, gone) in enumerate(requests):
        due = None if deadline is None else arrival + deadline
        message = submit_images(rid, *names, client=client, priority=priority, deadline=due)
        simulation.arrive(arrival, message)
        if gone is not None:
            simulation.cancel(arrival + gone, rid)
    simulation.encoder_ready(0.1)
    for lost in losses:
        simulation.lose(lost, lost + 0.3)
    for lost in encoder_losses:
        simulation.lose_encoder(lost, lost + 0.2)
    simulation.run()
    for rid, (_, names, *_rest) in enumerate(requests):
        outcome = simulation.outcomes[rid]
        assert len(outcome.ends) == 1
        if outcome.placed:
            assert (rid in simulation.embedded) == bool(names)
            assert BROKEN not in names
    images = simulation.policy._images
    assert not images._jobs
    assert simulation.arenas.patches.used == 0
    assert images._pinning == []
    # What stays is nobody's, and gives way to whoever comes.
    assert images._store.pin({b"all": simulation.arenas.embeddings.size - 64})
