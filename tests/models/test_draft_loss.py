import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from models.draft_loss import DECAY, Anchors, Unrolled, anchors_of, at, losses_of  # noqa: E402 - behind the skip above
from models.draft_model import Draft, DraftShape  # noqa: E402 - behind the skip above

SHAPE = DraftShape(hidden=16, heads=4, kv_heads=2, head_dim=8, intermediate=24, vocabulary=32)


def _unrolled() -> Unrolled:
    torch.manual_seed(1)
    ids, taps = torch.randint(0, 32, (1, 10)), torch.randn(1, 10, 48)
    return Unrolled(Draft(SHAPE), torch.randn(32, 16), ids, taps)


def test_anchors_are_the_entries_of_answers_with_a_token_left() -> None:
    answers = torch.zeros((2, 9), dtype=torch.bool)
    answers[0, 2:5] = answers[0, 6:9] = True  # two answers
    answers[1, 4:6] = True
    found = anchors_of(answers)
    assert found.entry.tolist() == [[1, 2, 5, 6], [3, 0, 1, 2]]
    assert found.room.tolist() == [[2, 1, 2, 1], [1, 0, 0, 0]]


def test_no_answer_leaves_one_anchor_without_room() -> None:
    assert anchors_of(torch.zeros((1, 5), dtype=torch.bool)).room.tolist() == [[0]]


def test_at_takes_rows_of_any_shape() -> None:
    values = torch.arange(24).view(2, 3, 4)
    assert at(values, torch.tensor([[2], [0]])).tolist() == [[[8, 9, 10, 11]], [[12, 13, 14, 15]]]
    assert at(values[..., 0], torch.tensor([[1], [1]])).tolist() == [[4], [16]]


def test_the_loss_is_the_decayed_cross_entropy_of_the_steps_with_room() -> None:
    unrolled, teacher = _unrolled(), torch.randn(1, 10, 32)
    anchors = Anchors(torch.tensor([[2, 4]]), torch.tensor([[2, 1]]))
    losses = losses_of(unrolled, teacher, anchors, steps=3)
    first = unrolled.first(anchors.entry)
    second, _ = unrolled.further(unrolled.ids[:, [4, 6]], first, anchors.entry, None)
    cross = torch.nn.functional.cross_entropy
    one = cross(unrolled.draft.logits(first)[0], teacher[0, [3, 5]].softmax(-1))
    two = cross(unrolled.draft.logits(second)[0, :1], teacher[0, [4]].softmax(-1))
    assert losses.loss.item() == pytest.approx((one + DECAY * two).item(), rel=1e-5)
    assert losses.total.tolist() == [2, 1, 0]


def test_a_teacher_that_is_the_draft_is_always_right() -> None:
    unrolled = _unrolled()
    anchors = Anchors(torch.tensor([[2]]), torch.tensor([[1]]))
    teacher = torch.zeros(1, 10, 32)
    teacher[0, 3] = unrolled.draft.logits(unrolled.first(anchors.entry))[0, 0].detach()
    assert losses_of(unrolled, teacher, anchors, 1).right.tolist() == [1]
    assert losses_of(unrolled, -teacher, anchors, 1).right.tolist() == [0]


def test_training_on_one_batch_lowers_the_loss() -> None:
    torch.manual_seed(2)
    draft, table = Draft(SHAPE), torch.randn(32, 16)
    ids, taps, teacher = torch.randint(0, 32, (2, 8)), torch.randn(2, 8, 48), torch.randn(2, 8, 32)
    anchors = anchors_of(torch.ones((2, 8), dtype=torch.bool))
    optimizer, seen = torch.optim.Adam(draft.parameters(), 1e-2), []
    for _ in range(20):
        loss = losses_of(Unrolled(draft, table, ids, taps), 5 * teacher, anchors, 3).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    assert seen[-1] < 0.5 * seen[0]
