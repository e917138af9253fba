import numpy as np
import pytest
from tokenizers import Tokenizer

from hearth.runtime.export.checkpoint import Checkpoint
from hearth.runtime.export.model_config import load_model_config
from hearth.runtime.export.options import ExportOptions
from models.perplexity import FLOAT, FORMS, HOME, Form, Perplexity, conversations, perplexity
from models.splits import held_out
from models.stream import Batch

MOST = {"int8": 1.01, "int4": 1.10}
"""How many times the perplexity of 16 bits that of rounded weights may be."""


@pytest.fixture(scope="module")
def batches() -> list[Batch]:
    return conversations(Tokenizer.from_file(str(HOME / "tokenizer.json")), held_out()[::120])


def measured(batches: list[Batch], options: ExportOptions) -> Perplexity:
    return perplexity(load_model_config(HOME), Checkpoint(HOME), batches, options)


@pytest.fixture(scope="module")
def whole(batches: list[Batch]) -> Perplexity:
    return measured(batches, FLOAT)


def test_the_model_knows_the_answers_of_prompts_that_it_never_saw(whole: Perplexity) -> None:
    assert 1 < whole.answers < 1.2


@pytest.mark.parametrize("form", [FORMS[0], *FORMS[3:]], ids=str)
def test_rounded_weights_cost_little(batches: list[Batch], whole: Perplexity, form: Form) -> None:
    found = measured(batches, form.options)
    assert found.answers <= whole.answers * MOST[form.body]
    assert found.text <= whole.text * MOST[form.body]
    assert found.right >= whole.right - 0.1


def test_rows_of_a_batch_are_whole_conversations(batches: list[Batch]) -> None:
    for ids, answers in batches:
        assert ids.shape == answers.shape
        assert answers.any(axis=1).all()
        assert not answers[ids == 0].any()
        assert (np.diff((ids == 0).argmax(axis=1)) >= 0).all() or (ids != 0).all()
