import pytest

from hearth_client import Client
from tests.systemd.installed import COMMAND, ENGINE, SERVICE, SOCKET, Installed
from tests.systemd.machine import PATIENCE_S, Machine

USER = "maria"
HOME = f"/srv/{USER}"
ENGINE_OF_TESTS = f"[Service]\nEnvironment=HEARTH_ENGINE={ENGINE} HEARTH_ENGINE_KIND=simulated\n"


class Maria:
    """A user whose service manager runs, also while she is away."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        machine.run("useradd", "--create-home", "--home-dir", HOME, "--user-group", USER)
        machine.run("loginctl", "enable-linger", USER)
        number = machine.run("id", "-u", USER).stdout.strip()
        self.folder = f"/run/user/{number}"
        machine.until(f"user@{number}.service", "ActiveState", "active")

    def run(self, *command: str) -> str:
        """What a command of hers prints."""
        own = ("env", f"XDG_RUNTIME_DIR={self.folder}", *command)
        return self._machine.run(*own, user=USER).stdout


@pytest.fixture(scope="module")
def maria(machine: Machine) -> Maria:
    return Maria(machine)


def test_a_service_of_a_user_from_the_install_to_a_clients_first_word_and_away_again(
    machine: Machine, maria: Maria
) -> None:
    Installed(machine)
    assert maria.run(COMMAND, "install", "--user").splitlines()[-2:] == [
        f"socket: {maria.folder}/hearth/hearth.sock",
        f"next: systemctl --user enable --now {SERVICE}",
    ]
    machine.write(f"{HOME}/.config/systemd/user/{SERVICE}.d/engine.conf", ENGINE_OF_TESTS)
    maria.run("systemctl", "--user", "daemon-reload")
    # The socket alone: the service starts when somebody comes.
    maria.run("systemctl", "--user", "enable", "--now", SOCKET)
    with Client(machine.path(f"{maria.folder}/hearth/hearth.sock"), timeout=PATIENCE_S) as client:
        assert client.generate("the lamp ", max_tokens=2).text()
        assert client.status().state == "ready"
        told = maria.run("systemctl", "--user", "show", "-p", "ActiveState,StatusText", SERVICE)
        assert told.splitlines() == ["StatusText=ready", "ActiveState=active"]
    maria.run(COMMAND, "uninstall", "--user")
    assert not machine.path(f"{maria.folder}/hearth/hearth.sock").exists()
    told = maria.run("systemctl", "--user", "show", "-p", "LoadState", SERVICE)
    assert told == "LoadState=not-found\n"
