from collections.abc import Iterator, MutableMapping
from typing import Any

import pytest
import structlog


@pytest.fixture(autouse=True)
def faults() -> Iterator[list[Any]]:
    """What was logged with a traceback: nothing, whatever comes."""
    found: list[Any] = []

    def look(_logger: Any, _name: str, event: MutableMapping[str, Any]) -> Any:
        if event.get("exc_info"):
            found.append(event)
        raise structlog.DropEvent

    before = structlog.get_config()
    structlog.configure(processors=[look])
    yield found
    structlog.configure(**before)
    assert found == []
