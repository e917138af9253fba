import re
import subprocess

import anyio
import pytest

from tests.daemon.observe.metrics.looks import metrics
from tests.daemon.observe.metrics.prometheus import MONITORING, tool
from tests.daemon.observe.metrics.test_registry import told

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
