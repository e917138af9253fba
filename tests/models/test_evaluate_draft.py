from pathlib import Path

import pytest
from tokenizers import Tokenizer

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from models.draft_base import Base  # noqa: E402 - needs torch
from models.draft_loss import Anchors  # noqa: E402 - likewise
from models.draft_trees import TreeShape  # noqa: E402 - likewise
from models.evaluate_draft import SHAPES, Tally, first_guess, greedy, report, tally  # noqa: E402 - behind the skip above
from models.splits import held_out  # noqa: E402 - behind the skip above

HOME = Path(__file__).parents[2] / "models" / "home"


@pytest.fixture(scope="module")
def base() -> Base:
    return Base(HOME, "cpu")


def test_a_round_emits_what_it_accepts_and_one_more_but_no_token_past_the_end() -> None:
    anchors = Anchors(torch.tensor([[4, 5, 6, 7, 8]]), torch.tensor([[5, 4, 3, 2, 1]]))
    lengths = torch.tensor([[1, 0, 0, 5, 0]])
    assert tally(anchors, lengths) == [Tally(5, 3)]  # 2 tokens, 1 token, 2 of 6 tokens
    assert tally(anchors, torch.zeros_like(lengths)) == [Tally(5, 5)]


def test_an_answer_of_one_token_needs_no_verification() -> None:
    assert tally(Anchors(torch.tensor([[4]]), torch.tensor([[0]])), torch.tensor([[3]])) == [
        Tally(0, 0)
    ]
    assert Tally().length == 0.0
    assert Tally(7, 2).length == 3.5


def test_greedy_answers_are_those_of_one_token_after_the_other(base: Base) -> None:
    torch.manual_seed(0)
    prompts = torch.randint(3, 1000, (2, 6))
    ids = torch.zeros((2, 14), dtype=torch.long)
    ids[:, :6] = prompts
    ids[1, 5] = 7
    lengths, end = torch.tensor([6, 5]), 2
    text = greedy(base, ids, lengths, end)
    for row, length in enumerate(lengths.tolist()):
        tokens = ids[row, :length].tolist()
        while len(tokens) < ids.shape[1] and (len(tokens) == length or tokens[-1] != end):
            tokens.append(int(base.read(torch.tensor([tokens])).logits[0, -1].argmax()))
        assert text.ids[row, : len(tokens)].tolist() == tokens
        assert text.answers[row].nonzero()[:, 0].tolist() == list(range(length, len(tokens)))


def test_the_first_guess_ends_with_the_expected_answer() -> None:
    tokenizer, prompts = Tokenizer.from_file(str(HOME / "tokenizer.json")), held_out()[:2]
    ids, lengths = first_guess(prompts, tokenizer)
    for row, prompt in enumerate(prompts):
        assert tokenizer.decode(ids[row, lengths[row] :].tolist()) == prompt.expected
        assert ids[row, lengths[row] - 1] != 0


def test_the_table_has_a_row_for_each_group_and_a_column_for_each_shape() -> None:
    lines = report({"lights": dict.fromkeys(SHAPES, Tally(6, 4))}).splitlines()
    assert "(10, 6, 60)" in lines[0]
    assert lines[2].split("|")[1:4] == [" lights ", " 6 ", " 1.50 "]
    assert TreeShape(1, 4, 5) in SHAPES
