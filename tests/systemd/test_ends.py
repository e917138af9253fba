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
        generations = [client.generate(PROMPT, max_tokens=50) for _ in range(6)]
        # Four have places, two wait.
        next(generations[0])
        stop = [*installed.machine.entering(), "systemctl", "stop", SERVICE]
        with subprocess.Popen(stop, stderr=subprocess.DEVNULL) as stopping:
            for generation in generations:
                generation.text()
                assert generation.done
                assert generation.done.usage.completion_tokens == 50
        # Else its session would start the service again.
        client.close()
        assert stopping.wait(PATIENCE_S) == 0
    assert installed.show("Result") == "success"
    with installed.client() as client:
        assert client.generate(PROMPT, max_tokens=2).text()
        assert installed.show("ActiveState") == "active"


def test_refused_settings_are_not_tried_again(installed: Installed) -> None:
    installed.settle(max_batch=TOO_MANY)
    assert installed.machine.run("systemctl", "start", SERVICE, check=False).returncode
    assert installed.show("ExecMainStatus") == "78"
    assert (installed.show("ActiveState"), installed.show("NRestarts")) == ("failed", "0")
    (entry, *_) = installed.machine.journal("-p", "err", f"_SYSTEMD_UNIT={SERVICE}")
    assert "max_batch: 1000000 is not allowed" in entry["MESSAGE"]


def test_refused_settings_under_a_client_end_the_socket_until_they_are_mended(
    installed: Installed,
) -> None:
    installed.settle(FEW_STARTS, max_batch=TOO_MANY)
    answers: list[str] = []
    client = installed.client()
    waiting = threading.Thread(target=_ask, args=(client, answers), daemon=True)
    waiting.start()
    installed.machine.until(SOCKET, "Result", "service-start-limit-hit")
    assert installed.show("ExecMainStatus") == "78"
    # The remedy of docs/operations.md, with the client still there.
    installed.write_settings()
    installed.machine.systemctl("reset-failed", SERVICE, SOCKET)
    installed.machine.systemctl("start", SOCKET)
    waiting.join(PATIENCE_S)
    assert answers


def _ask(client: Client, answers: list[str]) -> None:
    with client:
        answers.append(client.generate(PROMPT, max_tokens=2).text())
