import json
import math
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import cycle
from pathlib import Path

from anyio.pytest_plugin import FreePortFactory
from hearth_client import Client, DeadlineExceeded, PromptTooLong

from daemon.own_daemon import own_daemon
from tests.daemon.metrics.prometheus import MONITORING, scraping, tool

DASHBOARD = json.loads((MONITORING / "dashboard.json").read_text())
QUERIES = [target["expr"] for one in DASHBOARD["panels"] for target in one.get("targets", ())]
DEADLINES_S = (0.02, 0.05, 0.1)
PATIENCE_S = 90


@contextmanager
def load(socket: Path) -> Iterator[None]:
    """Requests that end as asked, others that are refused, and some that have begun and fail."""
    over = threading.Event()

    def ask() -> None:
        with Client(socket) as client:
            for deadline_s in cycle(DEADLINES_S):
                if over.wait(0.1):
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


def test_every_query_of_the_dashboard_has_an_answer(
    tiny_engine: Path, tmp_path: Path, free_tcp_port_factory: FreePortFactory
) -> None:
    tool("prometheus")
    port, own_port = free_tcp_port_factory(), free_tcp_port_factory()
    with (
        own_daemon(tiny_engine, ("--metrics-port", str(port))) as daemon,
        load(daemon.socket),
        scraping(tmp_path, own_port, port) as prometheus,
    ):
        left, limit = set(QUERIES), time.monotonic() + PATIENCE_S
        while left:
            for query in sorted(left):
                asked = query.replace("$__rate_interval", "30s").replace("$instance", ".+")
                if any(map(math.isfinite, prometheus.values(asked))):
                    left.remove(query)
            assert time.monotonic() < limit, f"no data: {left}"
            time.sleep(0.5)
        rules = prometheus.ask("rules")["groups"][0]["rules"]
        assert {rule["health"] for rule in rules} == {"ok"}
        assert {rule["name"] for rule in rules if rule["state"] == "firing"} == set()


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
