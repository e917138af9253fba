import signal

from tests.systemd.installed import Installed

PROMPT = "the lamp "


def test_a_client_that_comes_first_starts_it_and_is_answered_once_it_has_warmed_up(
    installed: Installed,
) -> None:
    installed.settle(step_ms=1000)
    assert installed.show("ActiveState") == "inactive"
    with installed.client() as client:
        assert client.status().state != "ready"
        assert installed.show("ActiveState") == "activating"
        assert client.generate(PROMPT, max_tokens=1).text()
        assert client.status().state == "ready"
        assert installed.show("ActiveState") == "active"


def test_a_frozen_service_goes_on_where_it_was(installed: Installed) -> None:
    installed.ready()
    with installed.client() as client:
        whole = client.generate(PROMPT, max_tokens=60).text()
        generation = client.generate(PROMPT, max_tokens=60)
        next(generation)
        installed.machine.systemctl("freeze", "hearth.service")
        assert installed.show("FreezerState") == "frozen"
        installed.machine.systemctl("thaw", "hearth.service")
        assert generation.text() == whole


def test_an_executor_that_stands_still_is_replaced_below_the_service_manager(
    installed: Installed,
) -> None:
    installed.ready(progress_timeout_s=1)
    daemon = installed.show("MainPID")
    with installed.client() as client:
        stopped = installed.signal_executor(signal.SIGSTOP)
        generation = client.generate(PROMPT, max_tokens=4)
        assert generation.text()
        assert installed.signal_executor(signal.SIGCONT) != stopped
    assert (installed.show("MainPID"), installed.show("NRestarts")) == (daemon, "0")


def test_a_daemon_that_is_killed_is_started_again_and_its_client_goes_on(
    installed: Installed,
) -> None:
    installed.ready()
    with installed.client() as client:
        assert client.generate(PROMPT, max_tokens=4).text()
        installed.signal_daemon(signal.SIGKILL)
        installed.until("NRestarts", "1")
        assert client.generate(PROMPT, max_tokens=4).text()


def test_a_second_start_names_the_first(installed: Installed) -> None:
    installed.ready()
    said = installed.hearth("serve", user="hearth", check=False)
    # In an environment of its own, and not in that of the service manager.
    assert f"process {installed.show('MainPID')} already serves /run/hearth/hearth.sock" in said
    assert installed.show("ActiveState") == "active"
