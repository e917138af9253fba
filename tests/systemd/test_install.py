import time

from hearth_client import Client

from tests.systemd.installed import SERVICE, SOCKET, Installed
from tests.systemd.machine import PATIENCE_S, Machine


def test_from_the_install_over_a_reboot_to_a_clients_first_word_and_away_again(
    machine: Machine,
) -> None:
    installed = Installed(machine)
    *_, where, then = installed.hearth("install").splitlines()
    socket = where.removeprefix("socket: ").split(",")[0]
    assert then == f"next: systemctl enable --now {SERVICE}"
    # The next boot starts it, as a new machine does that was made from an image.
    machine.systemctl("enable", SERVICE)
    machine.reboot()
    # The shipped model, whose engine has to be built first.
    came = time.time()
    with Client(machine.path(socket), timeout=PATIENCE_S) as client:
        assert client.generate("turn on the lamp", max_tokens=4).text()
        assert client.status().model == "home"
    assert machine.systemctl("is-system-running", "--wait") == "running\n"
    assert came < installed.when("ActiveEnterTimestamp")

    removed = installed.hearth("uninstall").splitlines()
    assert f"removed /etc/systemd/system/{SERVICE}" in removed
    assert not machine.path(socket).exists()
    for unit in (SERVICE, SOCKET):
        assert machine.show(unit, "LoadState") == "not-found"
    assert machine.path("/etc/hearth/hearth.toml").exists()
    assert machine.path("/var/cache/hearth/engines").exists()
    assert machine.run("getent", "passwd", "hearth").stdout
    installed.hearth("uninstall", "--purge")
    assert not machine.path("/var/cache/hearth").exists()
    assert machine.run("getent", "passwd", "hearth", check=False).returncode
