"""What the service does not survive, and how often it is tried."""

import threading
import time

import pytest

from hearth_client import Client
from tests.systemd.installed import SERVICE, SOCKET, Installed
from tests.systemd.machine import PATIENCE_S

PROMPT = "the lamp "
TOO_MANY = 1_000_000
FEW_STARTS = "[Unit]\nStartLimitBurst=2\n"


def test_refused_settings_are_not_tried_again_but_by_clients_until_the_socket_ends_too(
    installed: Installed,
) -> None:
    installed.settle(FEW_STARTS, max_batch=TOO_MANY)
    answers: list[str] = []
    client = installed.client()
    waiting = threading.Thread(target=_ask, args=(client, answers), daemon=True)
    waiting.start()
    installed.machine.until(SOCKET, "Result", "service-start-limit-hit")
    assert (installed.show("ExecMainStatus"), installed.show("NRestarts")) == ("78", "0")
    entries = installed.machine.journal("-p", "err", f"_SYSTEMD_UNIT={SERVICE}")
    assert len(entries) == 2
    assert "max_batch: 1000000 is not allowed" in entries[0]["MESSAGE"]
    # The remedy of docs/service.md, with the client still there.
    installed.write_settings()
    installed.machine.systemctl("reset-failed", SOCKET, SERVICE)
    installed.machine.systemctl("start", SERVICE)
    waiting.join(PATIENCE_S)
    assert answers


@pytest.mark.parametrize(("code", "starts"), [(1, 5), (69, 5), (71, 1), (78, 1)])
def test_a_failure_is_tried_again_as_often_as_its_exit_code_and_the_limit_say(
    installed: Installed, code: int, starts: int
) -> None:
    command = f"ExecStart=/bin/sh -c 'echo started; exit {code}'"
    installed.settle(f"[Service]\nRestartSec=50ms\nExecStart=\n{command}\n")
    began = time.time()
    installed.machine.run("systemctl", "start", SERVICE, check=False)
    installed.until("ActiveState", "failed")
    told = installed.machine.journal(f"_SYSTEMD_UNIT={SERVICE}", "MESSAGE=started")
    assert sum(int(entry["__REALTIME_TIMESTAMP"]) / 1e6 > began for entry in told) == starts
    assert installed.show("ExecMainStatus") == str(code)


def _ask(client: Client, answers: list[str]) -> None:
    with client:
        answers.append(client.generate(PROMPT, max_tokens=2).text())
