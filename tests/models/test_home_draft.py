from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tokenizers import Tokenizer  # noqa: E402 - behind the skip above

from models.draft_base import Base  # noqa: E402 - needs torch
from models.draft_folder import read_draft  # noqa: E402 - likewise
from models.draft_model import DraftShape  # noqa: E402 - likewise
from models.draft_trees import TreeShape  # noqa: E402 - likewise
from models.evaluate_draft import accept_lengths  # noqa: E402 - likewise
from models.splits import held_out  # noqa: E402 - behind the skip above

MODELS = Path(__file__).parents[2] / "models"


def test_the_shipped_draft_is_of_the_shape_that_is_trained() -> None:
    assert read_draft(MODELS / "home-draft").shape == DraftShape()


@pytest.mark.slow
def test_the_shipped_draft_has_three_tokens_accepted_in_a_round() -> None:
    base = Base(MODELS / "home", "cpu")
    draft = read_draft(MODELS / "home-draft")
    tokenizer = Tokenizer.from_file(str(MODELS / "home" / "tokenizer.json"))
    lengths = accept_lengths(draft, base, held_out()[::193], tokenizer)["all"]
    chain, tree = lengths[TreeShape(1, 4, 5)], lengths[TreeShape(4, 3, 16)]
    assert chain.emitted > 100
    assert 3.0 < chain.length <= 5.0
    assert 3.0 < tree.length <= 4.0
