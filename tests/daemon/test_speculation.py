"""The shipped model and its draft: greedy replies are those of plain decoding."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from hearth.bench.spec.command import VERIFY_SHAPES, SpecChoice, SpecSession, shape_name
from hearth.bench.spec.contest import VerifyFigures
from hearth.daemon.shipped import DRAFT, SOURCE
from hearth.runtime.export import ExportOptions, export_model
from hearth.runtime.export.draft_config import DraftOptions

pytestmark = pytest.mark.slow
PROMPTS = 12


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpecSession]:
    engine = tmp_path_factory.mktemp("shipped") / "home"
    draft = DraftOptions(folder=DRAFT)
    export_model(SOURCE, engine, ExportOptions(capacity=1024, draft=draft))
    choice = SpecChoice(engine=engine, plain=engine, prompts=PROMPTS, max_tokens=64)
    with closing(SpecSession.open(choice)) as opened:
        yield opened


@pytest.fixture(scope="module")
def verified(session: SpecSession) -> dict[str, VerifyFigures]:
    return session.verify([3])


@pytest.mark.parametrize("name", ["lookup", *map(shape_name, VERIFY_SHAPES)])
def test_greedy_replies_are_those_of_plain_decoding(
    verified: dict[str, VerifyFigures], name: str
) -> None:
    found = verified[f"{name}/b3"]
    assert found.failures == []
    assert found.equal + len(found.near_ties) == PROMPTS
    assert found.accept_length is not None
    assert found.accept_length > 1.5
