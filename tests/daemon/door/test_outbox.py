from hypothesis import given
from hypothesis import strategies as st

from hearth.daemon.door.sessions import Outbox
from hearth_client.protocol import (
    Accepted,
    Answer,
    Delta,
    Detokenized,
    Done,
    TokenLogprob,
    Tokens,
    Usage,
)


def delta(request_id: str, seq: int, text: str = "x") -> Delta:
    return Delta(id=request_id, seq=seq, text=text, tokens=[seq], logprobs=[])


def done(request_id: str) -> Done:
    return Done(id=request_id, reason="stop", usage=Usage(prompt_tokens=1, completion_tokens=1))


def test_deltas_of_one_request_grow_into_one() -> None:
    outbox = Outbox()
    outbox.add(Accepted(id="a", prompt_tokens=3), now=1.0)
    assert not outbox.merge(delta("a", 0))
    outbox.add(delta("a", 0, "one"), now=2.0)
    outbox.add(delta("b", 0, "other"), now=3.0)
    log = [TokenLogprob(logprob=-1.0)]
    more = Delta(id="a", seq=0, text=" two", tokens=[7, 8], logprobs=log, ended=9.0)
    assert outbox.merge(more)
    outbox.add(done("a"), now=4.0)
    assert outbox.blocked_since == 1.0
    sent: list[Answer] = []
    while (answer := outbox.head()) is not None:
        sent.append(answer)
        outbox.sent(5.0)
    assert sent[1] == Delta(
        id="a", seq=0, text="one two", tokens=[0, 7, 8], logprobs=log, ended=9.0
    )
    assert [type(answer).__name__ for answer in sent] == ["Accepted", "Delta", "Delta", "Done"]
    assert not outbox
    assert outbox.blocked_since == 5.0


def test_a_delta_that_was_sent_grows_no_more() -> None:
    outbox = Outbox()
    outbox.add(delta("a", 0), 0.0)
    assert outbox.bytes == 320 + 1 + 40
    outbox.sent(0.0)
    assert not outbox.merge(delta("a", 1))
    assert outbox.bytes == 0


def test_a_failed_request_leaves_only_its_own_delta() -> None:
    outbox = Outbox()
    outbox.add(delta("a", 0), 0.0)
    outbox.add(delta("b", 0), 0.0)
    outbox.withdraw("a")
    outbox.withdraw("unknown")
    head = outbox.head()
    assert isinstance(head, Delta)
    assert head.id == "b"
    assert len(outbox) == 1


def test_a_reply_under_a_used_id_does_not_grow_the_one_before() -> None:
    outbox = Outbox()
    outbox.add(delta("a", 0, "old"), 0.0)
    outbox.add(done("a"), 0.0)
    assert outbox.bytes > 0, "an answer counts, whether its request goes on or not"
    assert not outbox.merge(delta("a", 0, "new"))
    outbox.add(delta("a", 0, "new"), 0.0)
    assert outbox.merge(delta("a", 1, "er"))
    texts = []
    while (head := outbox.head()) is not None:
        texts.append(head.text if isinstance(head, Delta) else "done")
        outbox.sent(0.0)
    assert texts == ["old", "done", "newer"]


def test_logprobs_count_among_the_bytes_that_wait() -> None:
    outbox = Outbox()
    logs = [TokenLogprob(logprob=-1.0, top=[(1, -1.0)] * 20)] * 100
    outbox.add(Delta(id="a", seq=0, text="", tokens=[], logprobs=logs), 0.0)
    assert outbox.bytes >= 100 * 20 * 100


def test_conversions_are_counted_until_they_are_sent() -> None:
    outbox = Outbox()
    outbox.add(Tokens(id="a", tokens=[1] * 100), 0.0)
    outbox.add(Detokenized(id="b", text="x" * 50), 0.0)
    assert outbox.bytes == 2 * 320 + 100 * 40 + 50
    outbox.sent(0.0)
    outbox.sent(0.0)
    assert outbox.bytes == 0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=60))
def test_no_token_is_lost_doubled_or_reordered(steps: list[tuple[str, bool]]) -> None:
    outbox = Outbox()
    pushed: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    received: dict[str, list[int]] = {"a": [], "b": [], "c": []}

    def take() -> None:
        head = outbox.head()
        if isinstance(head, Delta):
            received[head.id] += head.tokens
            outbox.sent(0.0)

    for token, (request_id, reads) in enumerate(steps):
        pushed[request_id].append(token)
        new = Delta(id=request_id, seq=0, text="", tokens=[token])
        if not outbox.merge(new):
            outbox.add(new, 0.0)
        assert len(outbox) <= 3
        if reads:
            take()
    while outbox:
        take()
    assert received == pushed
    assert outbox.bytes == 0


def test_the_delta_of_an_earlier_request_that_looks_the_same_stays() -> None:
    outbox = Outbox()
    first, second = delta("a", 0), delta("a", 0)
    for answer in (first, done("a"), second):
        outbox.add(answer, now=1.0)
    outbox.withdraw("a")
    assert outbox.head() is first
    assert len(outbox) == 2
