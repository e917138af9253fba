"""Rows of the shipped model that join, leave, come back and fail: each is as if alone.

`python -m tests.runtime.generation.schedules` runs as many as one likes, and on a GPU.
"""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from click.testing import CliRunner

from hearth.runtime.config import load_config
from tests.runtime.generation.schedules.__main__ import Campaign, main
from tests.runtime.generation.schedules.home import export_home, settings_of

SCHEDULES = {"native": 26, "classic": 10}
"""Steps of the classic dialect take twice the time, and rows join and leave alike."""


@pytest.fixture
def campaign(tmp_path: Path, dialect: str) -> Iterator[Campaign]:
    @cache
    def folder(chunk: int) -> Path:
        return export_home(tmp_path / str(chunk), chunk, dialect=dialect)

    found = Campaign(folder, settings_of(load_config(folder(256))))
    yield found
    found.close()


def test_the_command_tells_figures_of_an_engine(tmp_path: Path, dialect: str) -> None:
    folder = export_home(tmp_path / "home", 32, dialect=dialect)
    arguments = ["--count", "2", "--engine", str(folder), "--json"]
    result = CliRunner().invoke(main, arguments, standalone_mode=False)
    figures = json.loads(result.stdout)["home"]
    assert (figures["schedules"], figures["failures"]) == (2, [])
    assert figures["tokens"] > 0


@pytest.mark.slow
def test_each_row_of_random_schedules_is_as_if_alone(campaign: Campaign, dialect: str) -> None:
    for number in range(SCHEDULES[dialect]):
        campaign.run(number)
    figures = campaign.figures
    assert figures.failures == []
    assert {"stop", "length", "cancelled", "non_finite", "executor_failed"} == set(figures.ends)
    assert figures.placings > 1.1 * figures.rows
    assert figures.tokens > 10 * figures.schedules
    assert figures.reused > 10 * figures.rows
    assert (figures.exact > 0.7 * figures.rows) == (dialect == "native")
