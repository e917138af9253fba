"""The service while it runs, and what starts it again; tests share a start where they can."""

import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest

from tests.systemd.installed import SERVICE, Installed

PROMPT = "the lamp "


def test_a_client_that_comes_first_starts_it_and_is_answered_once_it_has_warmed_up(
    installed: Installed,
) -> None:
    installed.settle()
    assert installed.show("ActiveState") == "inactive"
    came = time.time()
    with installed.client() as client:
        assert client.generate(PROMPT, max_tokens=1).text()
        assert client.status().state == "ready"
    assert installed.show("ActiveState") == "active"
    (*_, warm) = installed.machine.journal(f"_SYSTEMD_UNIT={SERVICE}", "HEARTH_EVENT=actor ready")
    # The kernel took this time as the line was sent, which comes before READY=1.
    told = int(warm["_SOURCE_REALTIME_TIMESTAMP"]) / 1e6
    assert came < told <= installed.when("ActiveEnterTimestamp")


def test_the_service_manager_has_the_word_that_clients_get(installed: Installed) -> None:
    installed.ready()
    with installed.client() as client:
        assert installed.show("StatusText") == client.status().state == "ready"


def test_the_journal_finds_a_request_by_the_id_that_its_client_got(installed: Installed) -> None:
    installed.ready()
    with installed.client() as client:
        generations = [client.generate(PROMPT, max_tokens=2) for _ in range(2)]
        for generation in generations:
            assert generation.text()
    entries = installed.machine.journal(f"REQUEST_ID={generations[1].request}")
    assert [entry["HEARTH_REASON"] for entry in entries] == ["length"]
    assert entries[0]["_SYSTEMD_UNIT"] == SERVICE


def test_a_second_start_names_the_first(installed: Installed) -> None:
    installed.ready()
    said = installed.hearth("serve", user="hearth", check=False)
    assert f"process {installed.show('MainPID')} already serves /run/hearth/hearth.sock" in said
    assert installed.show("ActiveState") == "active"


def test_a_reload_takes_what_it_can_names_the_rest_and_loses_no_request(
    installed: Installed,
) -> None:
    installed.ready()
    with installed.client() as client:
        generation = client.generate(PROMPT, max_tokens=100)
        next(generation)
        installed.write_settings(queue_requests=7, max_batch=2)
        installed.machine.systemctl("reload", SERVICE)
        # The outcome is there by now.
        (entry,) = installed.machine.journal("HEARTH_EVENT=reloaded")
        assert entry["HEARTH_CHANGED"] == '["queue_requests"]'
        assert entry["HEARTH_NEEDS_RESTART"] == '["max_batch"]'
        told = [one["MESSAGE"] for one in installed.machine.journal("-u", SERVICE)]
        assert "takes effect at a restart: max_batch" in told
        # What a start would refuse is refused now.
        installed.write_settings(engine="/opt/none")
        refused = installed.machine.run("systemctl", "reload", SERVICE, check=False)
        assert refused.returncode
        generation.text()
        assert generation.done
        assert generation.done.usage.completion_tokens == 100
    (error,) = installed.machine.journal("-p", "err", "HEARTH_EVENT=not reloaded")
    assert error["CODE"] == "engine_missing"
    assert installed.show("ActiveState") == "active"
    # As at first, by the other way.
    installed.write_settings()
    installed.signal_daemon(signal.SIGHUP)
    installed.machine.journal("HEARTH_EVENT=reloaded", least=2)


def test_a_frozen_service_goes_on_where_it_was(installed: Installed) -> None:
    installed.ready()
    with installed.client() as client:
        whole = client.generate(PROMPT, max_tokens=40).text()
        generation = client.generate(PROMPT, max_tokens=40)
        next(generation)
        installed.machine.systemctl("freeze", SERVICE)
        assert installed.show("FreezerState") == "frozen"
        installed.machine.systemctl("thaw", SERVICE)
        assert generation.text() == whole
    assert installed.show("NRestarts") == "0"


def test_the_executor_is_the_first_that_goes_when_memory_ends(installed: Installed) -> None:
    installed.ready()
    places = [Path(f"/proc/{process}/oom_score_adj") for process in installed.processes()]
    daemon, executor = (int(place.read_text()) for place in places)
    assert executor > daemon


def test_it_is_shut_in_as_its_unit_says(installed: Installed) -> None:
    installed.ready()
    for process in installed.processes():
        root = Path(f"/proc/{process}/root")
        assert [stat.S_IMODE((root / home).stat().st_mode) for home in ("home", "root")] == [0, 0]
        status = dict(line.split(":\t", 1) for line in _lines(f"/proc/{process}/status"))
        assert int(status["CapBnd"], 16) == 0
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
        assert installed.machine.run("id", "-u", "hearth").stdout.strip() in status["Uid"].split()


def test_its_memory_is_bounded(installed: Installed) -> None:
    installed.ready()
    (total,) = (line for line in _lines("/proc/meminfo") if line.startswith("MemTotal:"))
    limit = int(installed.show("MemoryMax"))
    assert limit == pytest.approx(int(total.split()[1]) * 1024 * 0.9, rel=1e-3)
    if "memory" not in installed.machine.run("cat", "/sys/fs/cgroup/cgroup.controllers").stdout:
        pytest.skip("the memory controller is not among this machine's control groups")
    group = f"/sys/fs/cgroup{installed.show('ControlGroup')}"
    assert installed.machine.run("cat", f"{group}/memory.max").stdout == f"{limit}\n"


def test_an_executor_that_stands_still_is_replaced_below_the_service_manager(
    installed: Installed,
) -> None:
    installed.ready()
    before = installed.processes()
    with installed.client() as client:
        installed.signal_executor(signal.SIGSTOP)
        assert client.generate(PROMPT, max_tokens=4).text()
    after = installed.processes()
    assert after[0] == before[0]
    assert after[1] != before[1]
    assert installed.show("NRestarts") == "0"


@pytest.mark.slow
def test_a_daemon_that_is_killed_or_stands_still_is_started_again_and_its_client_goes_on(
    installed: Installed,
) -> None:
    installed.ready()
    with installed.client() as client:
        assert client.generate(PROMPT, max_tokens=2).text()
        installed.signal_daemon(signal.SIGKILL)
        installed.until("NRestarts", "1")
        assert client.generate(PROMPT, max_tokens=2).text()
        installed.signal_daemon(signal.SIGSTOP)
        installed.until("NRestarts", "2")
        assert client.generate(PROMPT, max_tokens=2).text()
    entries = installed.machine.journal("-u", SERVICE)
    assert any("Watchdog timeout" in entry["MESSAGE"] for entry in entries)


def test_a_stop_under_load_answers_every_request_and_the_next_client_starts_it_again(
    installed: Installed,
) -> None:
    installed.ready()
    with installed.client() as client:
        # Four have places, two wait: they need 4 seconds, and a stop has 3 unless it asks for more.
        generations = [client.generate(PROMPT, max_tokens=100) for _ in range(6)]
        next(generations[0])
        stop = [*installed.machine.entering(), "systemctl", "stop", SERVICE]
        with subprocess.Popen(stop, stderr=subprocess.DEVNULL) as stopping:
            for generation in generations:
                generation.text()
                assert generation.done
                assert generation.done.usage.completion_tokens == 100
        assert stopping.returncode == 0
        assert installed.show("Result") == "success"
        # Of the same session.
        assert client.generate(PROMPT, max_tokens=2).text()
        assert client.status().state == "ready"


def _lines(path: str | Path) -> list[str]:
    return Path(path).read_text().splitlines()
