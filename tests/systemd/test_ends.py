"""How the service ends, and who starts it then."""

import subprocess
import threading

from hearth_client import Client

from tests.systemd.installed import SERVICE, SOCKET, Installed
from tests.systemd.machine import PATIENCE_S

PROMPT = "the lamp "
TOO_MANY = 1_000_000
FEW_STARTS = "[Unit]\nStartLimitBurst=2\n"


def test_a_stop_under_load_answers_every_request_and_the_next_client_starts_it_again(
    installed: Installed,
) -> None:
    installed.ready()
    with installed.client() as client:
        # Four have places, two wait.
        generations = [client.generate(PROMPT, max_tokens=50) for _ in range(6)]
        next(generations[0])
        stop = [*installed.machine.entering(), "systemctl", "stop", SERVICE]
        with subprocess.Popen(stop, stderr=subprocess.DEVNULL) as stopping:
            for generation in generations:
                generation.text()
                assert generation.done
                assert generation.done.usage.completion_tokens == 50
        assert stopping.returncode == 0
        assert installed.show("Result") == "success"
        # Of the same session.
        assert client.generate(PROMPT, max_tokens=2).text()
        assert client.status().state == "ready"


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


def _ask(client: Client, answers: list[str]) -> None:
    with client:
        answers.append(client.generate(PROMPT, max_tokens=2).text())
