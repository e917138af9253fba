"""Debian's Prometheus, scraping a daemon once a second."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

MONITORING = Path(__file__).parents[4] / "monitoring"
_START_S = 60


def tool(name: str) -> str:
    """The path of one of its programs; without it the test is skipped."""
    return shutil.which(name) or pytest.skip(f"{name} is not installed: apt-get install prometheus")


class Prometheus:
    """Answers queries at `own_port` over what it has scraped of `port`."""

    def __init__(self, folder: Path, own_port: int, port: int) -> None:
        self._at = f"http://127.0.0.1:{own_port}"
        config = (MONITORING / "prometheus.yml").read_text()
        config = config.replace("127.0.0.1:9464", f"127.0.0.1:{port}").replace("15s", "1s")
        config = config.replace("alerts.yml", str(MONITORING / "alerts.yml"))
        (folder / "prometheus.yml").write_text(config)
        arguments = [
            tool("prometheus"),
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={self._at.removeprefix('http://')}",
            "--log.level=error",
        ]
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(arguments, stderr=log, stdout=log)
        self._log = folder / "log"

    def ask(self, what: str, **parameters: str) -> Any:
        """What its HTTP API answers; None while it does not serve yet."""
        url = f"{self._at}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=20) as answer:  # noqa: S310 - our own
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            if error.code != HTTPStatus.SERVICE_UNAVAILABLE:
                raise AssertionError(error.read().decode()) from error
            return None
        except urllib.error.URLError:
            assert self.process.poll() is None, self._log.read_text()
            return None

    def values(self, query: str) -> list[float]:
        """The numbers of a query now."""
        found = self.ask("query", query=query)
        return [float(one["value"][1]) for one in found["result"]]

    def rules(self) -> list[dict[str, Any]]:
        """The alert rules, each with its `health` and `state`."""
        rules: list[dict[str, Any]] = self.ask("rules")["groups"][0]["rules"]
        return rules


@contextmanager
def scraping(folder: Path, own_port: int, port: int) -> Iterator[Prometheus]:
    prometheus = Prometheus(folder, own_port, port)
    try:
        deadline = time.monotonic() + _START_S
        while prometheus.ask("status/runtimeinfo") is None:
            assert time.monotonic() < deadline, "Prometheus does not start"
            time.sleep(0.1)
        yield prometheus
    finally:
        prometheus.process.kill()
        prometheus.process.wait()
