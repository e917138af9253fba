import os
from pathlib import Path

import pytest

from hearth.daemon.configuration.settings import SETTINGS
from hearth.daemon.configuration.sources import environment_source, file_source, flag_source
from hearth.runtime.errors import HearthError


def test_no_file_is_an_empty_source() -> None:
    assert file_source(None).values == {}


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(HearthError, match=r"none\.toml cannot be read: No such file"):
        file_source(tmp_path / "none.toml")


@pytest.mark.parametrize(
    "data",
    [
        b"threads = ",
        b"\xff\xfe",
        b"a = 1\na = 2",
        pytest.param(b"a = " + b"[" * 100_000, id="nested too deep"),
        pytest.param(b"a = " + b"9" * 10_000, id="a number of too many digits"),
    ],
)
def test_a_file_that_is_not_toml_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(data)
    with pytest.raises(HearthError, match=r"bad\.toml is not valid TOML") as caught:
        file_source(path)
    assert caught.value.field == "config"


def test_a_pipe_that_may_never_end_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "pipe.toml"
    os.mkfifo(path)
    for never_ends in (path, Path("/dev/zero")):
        with pytest.raises(HearthError, match="is a pipe or a device: give a file"):
            file_source(never_ends)


def test_no_settings_at_all_may_be_asked_for() -> None:
    assert file_source(Path(os.devnull)).values == {}


def test_the_place_of_a_syntax_error_is_told(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("threads = 1\nspin = maybe\n")
    with pytest.raises(HearthError, match=r"\(at line 2, column 8\)"):
        file_source(path)


def test_variables_of_others_and_empty_ones_are_left_alone() -> None:
    environ = {"HOME": "/x", "HEARTH_CONFIG": "f", "HEARTH_CACHE": "c", "HEARTH_SPIN": ""}
    assert environment_source(environ, {"spin"}).values == {}


def test_flags_that_were_not_given_do_not_count() -> None:
    source = flag_source({"threads": None, "spin": False})
    assert source.values == {"spin": False}
    assert not source.strict


def test_each_source_describes_a_setting_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "h.toml"
    path.write_text("hold_s = 1")
    assert file_source(path).describe("hold_s") == f"{path}, hold_s"
    assert environment_source({}, ()).describe("hold_s") == "$HEARTH_HOLD_S"
    assert flag_source({}).describe("hold_s") == "--hold-s"


def test_what_kubernetes_tells_of_a_service_is_no_setting() -> None:
    links = {
        "HEARTH_SERVICE_HOST": "10.0.0.11",
        "HEARTH_SERVICE_PORT": "6379",
        "HEARTH_SERVICE_PORT_HTTP": "6379",
        "HEARTH_PORT": "tcp://10.0.0.11:6379",
        "HEARTH_METRICS_PORT": "tcp://10.0.0.13:9464",
        "HEARTH_PORT_6379_TCP": "tcp://10.0.0.11:6379",
        "HEARTH_PORT_6379_TCP_PROTO": "tcp",
        "HEARTH_PORT_6379_TCP_PORT": "6379",
        "HEARTH_PORT_6379_TCP_ADDR": "10.0.0.11",
        "HEARTH_GATEWAY_PORT": "udp://10.0.0.12:53",
        "HEARTH_GATEWAY_SERVICE_HOST": "10.0.0.12",
    }
    assert environment_source(links, SETTINGS).values == {}


@pytest.mark.parametrize("name", ["HEARTH_PORT", "HEARTH_HOST", "HEARTH_PORTS"])
def test_a_variable_that_somebody_set_is_refused_all_the_same(name: str) -> None:
    with pytest.raises(HearthError, match="no such setting"):
        environment_source({name: "8080"}, SETTINGS)


def test_no_setting_looks_like_a_service_link() -> None:
    # As people write a port; with tcp:// it is the link to a service that is called hearth-metrics.
    values = {f"HEARTH_{name.upper()}": "8080" for name in SETTINGS}
    assert len(environment_source(values, SETTINGS).values) == len(SETTINGS)


def test_a_name_that_stands_there_twice_is_said_to(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("threads = 1\nspin = true\nthreads = 2\n")
    with pytest.raises(HearthError, match=r"line 3, .*: a name is there for the second"):
        file_source(path)


@pytest.mark.parametrize("given", ["/a/b", "~/b", "tcp://127.0.0.1:1", ""])
def test_a_path_in_a_file_begins_where_the_file_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "etc").mkdir()
    path = Path("etc") / "h.toml"
    path.write_text(f'weights = "tuned.safetensors"\nengine = "{given}"\nlog_level = "info"\n')
    values = file_source(path).values
    assert values["weights"] == str(tmp_path / "etc" / "tuned.safetensors")
    assert (values["engine"], values["log_level"]) == (given, "info")
