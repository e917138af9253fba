from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.systemd.machine import Machine, why_none

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a machine where none can be had, and say why."""
    concerned = [item for item in items if HERE in item.path.parents]
    reason = why_none() if concerned else None
    if reason:
        for item in concerned:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A machine that has booted; tests of a module share it."""
    booted = Machine(tmp_path_factory.mktemp("machine"), {})
    yield booted
    booted.close()
