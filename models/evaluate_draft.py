"""The draft's accept length on held-out prompts: `python -m models.evaluate_draft --every 12`.

Accept length is the number of tokens emitted for each verification, in greedy decoding.

Greedy verification reproduces the base's own text, so a draft's tree can be judged from that text
alone: a node is accepted if its path is the text's and it is among the nodes that are verified.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from models.conversations import render
from models.draft import Anchors, Base, Draft, Entries, Unrolled, anchors_of, at, read_draft
from models.folder import CONFIG
from models.splits import Prompt, held_out
from models.stream import END


class TreeShape(NamedTuple):
    """Candidates kept at each depth, the depth, and the nodes verified, root included."""

    top_k: int
    steps: int
    size: int


class _Beams(NamedTuple):
    """The candidates that are drafted on, [B, A, K]: token, score, and whether it is the text."""

    tokens: Tensor
    scores: Tensor
    true: Tensor


class _Table:
    """All scored nodes of the trees, and by depth the score of the node that is the text's."""

    def __init__(self) -> None:
        self._scores: list[Tensor] = []
        self._true: list[Tensor] = []

    def add(self, beams: _Beams) -> None:
        self._scores.append(beams.scores)
        found = beams.scores.masked_fill(~beams.true, -torch.inf)
        self._true.append(found.max(-1).values)

    def accepted(self, size: int) -> Tensor:
        """Return [B, A]: the depth down to which the text is within the best `size` nodes."""
        table, true = torch.cat(self._scores, -1), torch.stack(self._true, -1)
        better = (table[..., None, :] > true[..., None]).sum(-1)
        inside = true.isfinite() & (better < size - 1)
        return inside.long().cumprod(-1).sum(-1)


def _top(logits: Tensor, wanted: Tensor, top_k: int) -> _Beams:
    """Return the best tokens of logits [..., V] beside the token [...] that the text has."""
    scores, tokens = logits.float().log_softmax(-1).topk(top_k, -1)
    return _Beams(tokens, scores, tokens == wanted[..., None])


def _children(parents: _Beams, own: _Beams) -> _Beams:
    """Return the K·K children [B, A, K·K] with scores and truth summed along their paths."""
    shape = (*parents.tokens.shape, -1)
    scores = own.scores.reshape(shape) + parents.scores[..., None]
    true = own.true.reshape(shape) & parents.true[..., None]
    return _Beams(*(part.flatten(2) for part in (own.tokens.reshape(shape), scores, true)))


def _select(values: Tensor, parent: Tensor) -> Tensor:
    """Return values [B, A·K, ...] of the parents [B, A, K] of each anchor."""
    _, anchors, width = parent.shape
    first = torch.arange(anchors, device=parent.device)[:, None] * width
    return at(values, (first + parent).flatten(1))


def accepted(unrolled: Unrolled, entry: Tensor, shape: TreeShape) -> Tensor:
    """Return [B, A]: how many drafted tokens after these base-fed entries the text contains.

    The trees are EAGLE-2's: Li et al., "EAGLE-2: Faster Inference of Language Models with Dynamic
    Draft Trees", 2024, section 4.
    """
    k, ids, logits = shape.top_k, unrolled.ids, unrolled.draft.logits

    def text(depth: int) -> Tensor:
        return at(ids, torch.clamp(entry + 1 + depth, max=ids.shape[1] - 1))

    table = _Table()
    first = unrolled.first(entry)
    beams = _top(logits(first), text(1), k)
    table.add(beams)
    x, chain = first.repeat_interleave(k, 1), None
    anchors = entry.repeat_interleave(k, 1)
    for depth in range(2, shape.steps + 1):
        x, chain = unrolled.further(beams.tokens.flatten(1), x, anchors, chain)
        wanted = text(depth).repeat_interleave(k, 1)
        children = _children(beams, _top(logits(x), wanted, k))
        table.add(children)
        scores, best = children.scores.topk(k, -1)
        beams = _Beams(children.tokens.gather(-1, best), scores, children.true.gather(-1, best))
        x = _select(x, best // k)
        chain = Entries(*(_select(part, best // k) for part in chain))
    return table.accepted(shape.size)


SHAPES: Final = (
    *(TreeShape(1, steps, steps + 1) for steps in range(1, 7)),
    TreeShape(4, 3, 16),
    TreeShape(8, 1, 9),
    TreeShape(10, 6, 60),
)
ROWS: Final = 20
SLACK: Final = 32  # a wrong answer may be longer than the right one
MAX_ROUNDS: Final = 400


class Text(NamedTuple):
    """Right-padded prompts with the base's greedy answers [B, S], and which tokens are answers."""

    ids: Tensor
    answers: Tensor


class Tally(NamedTuple):
    """Tokens emitted in so many verifications."""

    emitted: int = 0
    rounds: int = 0

    @property
    def length(self) -> float:
        """Return the accept length."""
        return self.emitted / self.rounds if self.rounds else 0.0


def greedy(base: Base, ids: Tensor, prompts: Tensor, end: int) -> Text:
    """Return the base's greedy answers to prompts of these lengths [B], from a first guess.

    The guess behind each prompt is replaced by what the base says until nothing changes: every
    pass settles one more token at least. An answer ends with the end token or with the row.
    """
    place = torch.arange(ids.shape[1], device=ids.device)
    behind = place >= prompts[:, None]
    for _ in range(MAX_ROUNDS):
        said = base.read(ids).logits.argmax(-1).roll(1, 1)
        new = torch.where(behind, said, ids)
        ended = (behind & (new == end)).cumsum(1)
        answers = behind & ((ended == 0) | ((ended == 1) & (new == end)))
        if bool((new == ids)[answers].all()):
            return Text(new * (answers | ~behind), answers)
        ids = new
    raise RuntimeError(f"no greedy answer after {MAX_ROUNDS} passes")


def first_guess(prompts: Sequence[Prompt], tokenizer: Tokenizer) -> tuple[Tensor, Tensor]:
    """Return right-padded prompts with the expected answers, and the prompts' lengths."""
    chats = [tokenizer.encode(render(p.messages, prompt=True)).ids for p in prompts]
    rows = [c + tokenizer.encode(p.expected + END).ids for c, p in zip(chats, prompts, strict=True)]
    ids = torch.zeros((len(rows), max(map(len, rows)) + SLACK), dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row)
    return ids, torch.tensor([len(chat) for chat in chats])


def tally(anchors: Anchors, lengths: Tensor) -> list[Tally]:
    """Return for each row what rounds of these accepted lengths [B, A] emit."""
    found = []
    for room, length in zip(anchors.room.tolist(), lengths.tolist(), strict=True):
        place, rounds, count = 0, 0, sum(r > 0 for r in room)
        while place < count:  # the next anchor follows by as many entries as tokens are emitted
            place += min(length[place] + 1, room[place])
            rounds += 1
        found.append(Tally(count, rounds))
    return found


@torch.no_grad()  # type: ignore[untyped-decorator] # torch has no types here
def measure(draft: Draft, base: Base, text: Text) -> dict[TreeShape, list[Tally]]:
    """Return by shape, for each row, what the draft's proposals let the base emit."""
    anchors = anchors_of(text.answers)
    unrolled = Unrolled(draft, base.embedding, text.ids, base.read(text.ids).taps)
    return {shape: tally(anchors, accepted(unrolled, anchors.entry, shape)) for shape in SHAPES}


def _texts(
    base: Base, prompts: Sequence[Prompt], tokenizer: Tokenizer
) -> Iterator[tuple[list[Prompt], Text]]:
    order = sorted(prompts, key=lambda p: len(render(p.messages)) + len(p.expected))
    for begin in range(0, len(order), ROWS):
        part = order[begin : begin + ROWS]
        ids, lengths = (t.to(base.device) for t in first_guess(part, tokenizer))
        yield part, greedy(base, ids, lengths, CONFIG["eos_token_id"])


def accept_lengths(
    draft: Draft, base: Base, prompts: Sequence[Prompt], tokenizer: Tokenizer
) -> dict[str, dict[TreeShape, Tally]]:
    """Return the tally by group, and over all, and by shape of the proposals."""
    tallies: dict[str, dict[TreeShape, Tally]] = defaultdict(dict)
    for part, text in _texts(base, prompts, tokenizer):
        for shape, found in measure(draft, base, text).items():
            for prompt, one in zip(part, found, strict=True):
                for group in (prompt.group, "all"):
                    sum_ = tallies[group].get(shape, Tally())
                    tallies[group][shape] = Tally(*map(sum, zip(sum_, one, strict=True)))
    return {group: tallies[group] for group in sorted(tallies, key=lambda g: (g == "all", g))}


def report(tallies: dict[str, dict[TreeShape, Tally]]) -> str:
    """Return a table with one line for each group and one column for each shape."""
    head = "| group | tokens | " + " | ".join(f"{tuple(shape)}" for shape in SHAPES) + " |"
    rows = [head, "| --- |" + " ---: |" * (len(SHAPES) + 1)]
    for group, by_shape in tallies.items():
        cells = [f"{by_shape[shape].length:.2f}" for shape in SHAPES]
        rows.append(f"| {group} | {by_shape[SHAPES[0]].emitted} | {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    """Print the accept length by group and by shape of the proposals."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, default=Path("models/home"))
    parser.add_argument("--draft", type=Path, default=Path("models/home-draft"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if cuda else "cpu")
    parser.add_argument("--every", type=int, help="ask only every so-many-th prompt", default=1)
    flags = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(flags.base / "tokenizer.json"))
    base = Base(flags.base, flags.device)
    draft = read_draft(flags.draft).to(flags.device)
    prompts = held_out()[:: flags.every]
    print(report(accept_lengths(draft, base, prompts, tokenizer)))


if __name__ == "__main__":
    main()
