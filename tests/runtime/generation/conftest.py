import pytest

from hearth.runtime.kv_cache.page_loads import LoadCostModel
from hearth.runtime.kv_cache.pages import Match


@pytest.fixture(autouse=True)
def loading_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """These models compute a token about as fast as they load it: what is there is loaded."""

    def tokens(_: LoadCostModel, match: Match) -> int:
        return match.tokens

    monkeypatch.setattr(LoadCostModel, "tokens", tokens)
