import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from click.testing import CliRunner
from msgspec import structs

from hearth.daemon.cli import status as module
from hearth_client import ExecutorReport, StageReport, StatusReport


class FakeClient:
    def status(self) -> StatusReport:
        return StatusReport(
            id="1",
            server="hearth 0.1.0",
            model="home",
            state="ready",
            uptime_s=12.5,
            clients=2,
            running=1,
            queued=3,
            queued_tokens=40,
            totals={"requests": 9},
            engine={"dtype": "float32"},
            executor=ExecutorReport(
                prefill=StageReport(steps=2, tokens=40, seconds=0.5),
                generation=StageReport(steps=3, tokens=5, seconds=0.25),
            ),
        )


@pytest.fixture(autouse=True)
def _client(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def connected(
        _socket: str | None, _key: str | None, *, status_only: bool, name: str
    ) -> Iterator[FakeClient]:
        assert (status_only, name) == (True, "hearth-status")
        yield FakeClient()

    monkeypatch.setattr(module, "connected", connected)


def test_people_get_a_table() -> None:
    text = CliRunner().invoke(module.status).output
    for words in (
        "ready",
        "home",
        "1 running, 3 queued",
        "float32",
        "40 tokens in 2",
        "total requests",
    ):
        assert words in text


def test_programs_get_one_object_without_the_protocol_s_own_fields() -> None:
    report = json.loads(CliRunner().invoke(module.status, ["--json"]).output)
    assert report["queued_tokens"] == 40
    assert report["executor"]["generation"]["steps"] == 3
    assert report["engine"] == {"dtype": "float32"}
    assert not {"t", "id"} & set(report)


def test_the_state_is_told_in_the_words_of_the_service_manager() -> None:
    report = structs.replace(
        FakeClient().status(), state="loading", stage="verifying", share=0.5, reason="it was lost"
    )
    assert ("state", "loading: verifying, 50% (it was lost)") in module._rows(report)
