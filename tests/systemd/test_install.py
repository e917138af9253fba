import time

from hearth_client import Client
from tests.systemd.installed import ENGINE, SERVICE, SOCKET, Installed
from tests.systemd.machine import PATIENCE_S, Machine


def test_from_the_install_over_a_reboot_to_a_clients_first_word_and_away_again(
    machine: Machine,
) -> None:
    installed = Installed(machine)
    *_, where, then = installed.hearth("install").splitlines()
    socket = where.removeprefix("socket: ").split(",")[0]
    assert then == f"next: systemctl enable --now {SERVICE}"
    # An engine that computes; the shipped model's would have to be built here.
    machine.write("/etc/hearth/hearth.toml", f'engine = "{ENGINE}"\n')
    # The next boot starts it, as a new machine does that was made from an image.
    machine.systemctl("enable", SERVICE)
    machine.reboot()
    came = time.time()
    with Client(machine.path(socket), timeout=PATIENCE_S) as client:
        assert client.generate("turn on the lamp", max_tokens=4).text()
        assert client.status().model == "tiny"
    assert machine.systemctl("is-system-running", "--wait") == "running\n"
    assert came < installed.when("ActiveEnterTimestamp")

    removed = installed.hearth("uninstall").splitlines()
    assert f"removed /etc/systemd/system/{SERVICE}" in removed
    assert not machine.path(socket).exists()
    for unit in (SERVICE, SOCKET):
        assert machine.show(unit, "LoadState") == "not-found"
    assert machine.path("/etc/hearth/hearth.toml").exists()
    assert machine.path("/var/cache/hearth").exists()
    assert machine.run("getent", "passwd", "hearth").stdout
    installed.hearth("uninstall", "--purge")
    assert not machine.path("/var/cache/hearth").exists()
    assert machine.run("getent", "passwd", "hearth", check=False).returncode
