from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from models.draft_loss import Unrolled  # noqa: E402 - needs torch
from models.draft_model import Draft, DraftShape  # noqa: E402 - likewise
from models.draft_trees import TreeShape, accepted  # noqa: E402 - likewise

SHAPE = DraftShape(hidden=16, heads=4, kv_heads=2, head_dim=8, intermediate=24, vocabulary=6)

Node = tuple[tuple[int, ...], float, Any, Any]  # path, score, output and chain


def _unrolled(seed: int) -> Unrolled:
    torch.manual_seed(seed)
    ids, taps = torch.randint(0, 6, (2, 12)), torch.randn(2, 12, 48)
    return Unrolled(Draft(SHAPE), torch.randn(6, 16), ids, taps)


def _best(unrolled: Unrolled, hidden: Any, row: int, top_k: int) -> list[tuple[int, float]]:
    scores = unrolled.draft.logits(hidden)[row, 0].log_softmax(-1)
    return [(int(t), float(scores[t])) for t in scores.argsort(descending=True)[:top_k]]


def _plain(unrolled: Unrolled, row: int, anchor: int, shape: TreeShape) -> int:
    """Return the accepted length of one tree, built node by node as (path, score)."""
    entry = torch.full((2, 1), anchor)
    hidden = unrolled.first(entry)
    level: list[Node] = [
        ((t,), s, hidden, None) for t, s in _best(unrolled, hidden, row, shape.top_k)
    ]
    nodes = [node[:2] for node in level]
    for _ in range(shape.steps - 1):
        children: list[Node] = []
        for path, score, x, chain in level:
            token = torch.full((2, 1), path[-1])
            out, own = unrolled.further(token, x, entry, chain)
            for t, s in _best(unrolled, out, row, shape.top_k):
                children.append(((*path, t), score + s, out, own))
        nodes += [child[:2] for child in children]
        level = sorted(children, key=lambda c: -c[1])[: shape.top_k]
    kept = {path for path, _ in sorted(nodes, key=lambda n: -n[1])[: shape.size - 1]}
    text, length = tuple(unrolled.ids[row, anchor + 2 :].tolist()), 0
    while text[: length + 1] in kept:
        length += 1
    return length


@pytest.mark.parametrize(
    "shape", [TreeShape(1, 4, 5), TreeShape(3, 3, 10), TreeShape(4, 2, 5), TreeShape(5, 1, 6)]
)
def test_every_anchor_accepts_what_a_tree_built_node_by_node_accepts(shape: TreeShape) -> None:
    lengths = set()
    with torch.no_grad():
        for seed in range(3):
            unrolled = _unrolled(seed)
            entry = torch.tensor([[0, 3, 5], [1, 2, 4]])
            found = accepted(unrolled, entry, shape)
            for row, anchors in enumerate(entry.tolist()):
                plain = [_plain(unrolled, row, anchor, shape) for anchor in anchors]
                assert found[row].tolist() == plain
                lengths.update(plain)
    assert len(lengths) > 1


def test_a_tree_of_every_token_accepts_any_first_token() -> None:
    with torch.no_grad():
        found = accepted(_unrolled(0), torch.tensor([[0, 1], [2, 3]]), TreeShape(6, 1, 7))
    assert found.tolist() == [[1, 1], [1, 1]]
