from collections.abc import Iterator
from pathlib import Path

import pytest

from hearth.runtime.export import ExportOptions, export_model
from tests.conftest import REFERENCE
from tests.systemd.installed import BOUND, ENGINE, Installed
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
    """A machine that has booted, with a random model; tests of a module share it."""
    engine = tmp_path_factory.mktemp("engines") / "tiny"
    export_model(REFERENCE, engine, ExportOptions(capacity=512, max_batch=4))
    machine = Machine(tmp_path_factory.mktemp("machine"), {**BOUND, engine: ENGINE})
    try:
        machine.systemctl("is-system-running", "--wait")
        yield machine
    finally:
        machine.close()


@pytest.fixture(scope="module")
def installed(machine: Machine) -> Installed:
    """Hearth as a service of the machine."""
    installed = Installed(machine)
    installed.hearth("install")
    return installed
