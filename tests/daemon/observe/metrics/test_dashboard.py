import json
import math
import re
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import anyio
import pytest
from anyio.pytest_plugin import FreePortFactory
from click.testing import CliRunner

from hearth.daemon.cli import cli
from hearth.daemon.own_daemon import own_daemon
from hearth_client import Client, DeadlineExceeded, PromptTooLong
from tests.daemon.door.harness import greet, hear, raw_client, say, until
from tests.daemon.observe.metrics.looks import metrics
from tests.daemon.observe.metrics.prometheus import MONITORING, scraping, tool
from tests.daemon.observe.metrics.test_registry import told

DASHBOARD = json.loads((MONITORING / "dashboard.json").read_text())
QUERIES = [target["expr"] for one in DASHBOARD["panels"] for target in one.get("targets", ())]
DEADLINES_S = (0.02, 0.05, 0.1)
PATIENCE_S = 90
REFUSED = 'hearth_refusals_total{code="unknown_message"} 1.0\n'


class Served(NamedTuple):
    """A daemon of the tiny model: the socket of its clients, and the port of its metrics."""

    socket: Path
    port: int


@pytest.fixture(scope="module")
def served(tiny_engine: Path, free_tcp_port_factory: FreePortFactory) -> Iterator[Served]:
    port = free_tcp_port_factory()
    with own_daemon(tiny_engine, ("--metrics-port", str(port))) as daemon:
        yield Served(daemon.socket, port)


@contextmanager
def load(socket: Path) -> Iterator[None]:
    """Requests that end as asked, others that are refused, and some that have begun and fail."""
    over = threading.Event()

    def ask() -> None:
        with Client(socket) as client:
            for deadline_s in cycle(DEADLINES_S):
                if over.wait(0.2):
                    break
                client.generate("the lamp is the lamp is", max_tokens=30, speculation=True).text()
                with suppress(DeadlineExceeded):
                    client.generate(
                        "a", max_tokens=90, ignore_eos=True, deadline_s=deadline_s
                    ).text()
                with suppress(PromptTooLong):
                    client.generate("x " * 500, max_tokens=1).text()

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.slow
def test_every_query_of_the_dashboard_has_an_answer(
    served: Served, tmp_path: Path, free_tcp_port_factory: FreePortFactory
) -> None:
    tool("prometheus")
    with (
        load(served.socket),
        scraping(tmp_path, free_tcp_port_factory(), served.port) as prometheus,
    ):
        left, limit = set(QUERIES), time.monotonic() + PATIENCE_S
        while left:
            for query in sorted(left):
                asked = query.replace("$__rate_interval", "30s").replace("$instance", ".+")
                if any(map(math.isfinite, prometheus.values(asked))):
                    left.remove(query)
            assert time.monotonic() < limit, f"no data: {left}"
            time.sleep(0.5)
        until(lambda: all(rule["health"] != "unknown" for rule in prometheus.rules()), PATIENCE_S)
        assert {rule["health"] for rule in prometheus.rules()} == {"ok"}
        assert not [rule for rule in prometheus.rules() if rule["state"] == "firing"]


def page_of(served: Served) -> str:
    at = f"http://127.0.0.1:{served.port}/metrics"
    with urllib.request.urlopen(at, timeout=60) as answer:
        text: str = answer.read().decode()
        return text


def test_a_command_and_the_port_tell_the_same_and_nothing_that_a_client_wrote(
    served: Served,
) -> None:
    with raw_client(served.socket) as client:
        greet(client, client="secret name")
        say(client, {"t": "generate", "id": "secret id", "prompt": "secret", "max_tokens": 1})
        said = [hear(client)["t"] for _ in range(3)]
        say(client, {"t": "secret type", "id": "x"})
        assert hear(client)["code"] == "unknown_message"
    assert said == ["accepted", "delta", "done"]
    # The executor tells its figures by itself, and a page may be a moment old.
    until(lambda: "hearth_engine" in page_of(served) and REFUSED in page_of(served), 60)
    page = page_of(served)
    done = CliRunner().invoke(cli, ["metrics", "--socket", str(served.socket)])
    assert done.exit_code == 0
    for text in (page, done.output):
        assert 'hearth_state{state="ready"} 1.0\n' in text
        assert REFUSED in text
        assert "secret" not in text
        names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
        assert {"hearth_places", "hearth_engine_steps_total", "process_open_fds"} <= names


def test_the_dashboard_chooses_among_data_sources_and_instances() -> None:
    names = {one["name"] for one in DASHBOARD["templating"]["list"]}
    assert names == {"datasource", "instance"}
    assert all("$instance" in query for query in QUERIES)
    variables = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD["panels"])))
    assert variables == {*names, "__rate_interval"}


def test_panels_stand_side_by_side() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            assert x < 24
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]


RULES = (MONITORING / "alerts.yml").read_text()
TESTS = (MONITORING / "alerts_test.yml").read_text()


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "config", "prometheus.yml"),
        ("check", "rules", "alerts.yml"),
        ("test", "rules", "alerts_test.yml"),
    ],
)
def test_promtool_accepts(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        [tool("promtool"), *arguments], cwd=MONITORING, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


async def test_promtool_finds_no_fault_with_names_and_units() -> None:
    page = (await metrics().expose()).page
    done = await anyio.run_process([tool("promtool"), "check", "metrics"], input=page, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_each_alert_is_seen_silent_and_firing() -> None:
    alerts = re.findall(r"^      - alert: (\w+)$", RULES, re.MULTILINE)
    silent = re.findall(r"^      - \{eval_time: \w+, alertname: (\w+)\}$", TESTS, re.MULTILINE)
    firing = re.findall(r"^        alertname: (\w+)\n        exp_alerts:\n", TESTS, re.MULTILINE)
    assert len(alerts) == len(set(alerts)) > 10
    assert set(silent) == set(firing) == set(alerts)


async def test_all_metrics_that_are_named_exist() -> None:
    samples = {one.name for family in (await told()).values() for one in family.samples}
    texts = [path.read_text() for path in MONITORING.iterdir()]
    named = {name for text in texts for name in re.findall(r"\b(?:hearth|process)_\w+", text)}
    assert named - {"hearth_info"} <= samples
    assert len(named) > 30
