import errno
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from hearth.daemon.configuration.load import (
    OLD_NAMES,
    environment_source,
    file_source,
    flag_source,
    load_settings,
)
from hearth.daemon.configuration.settings import (
    SETTINGS,
    Settings,
    flag_of,
    settings_of,
    variable_of,
)
from hearth.daemon.configuration.words import allowed, shown
from hearth.runtime.errors import HearthError
from hearth.runtime.options import EagleDraftingConfig, check_speculation


def write(folder: Path, text: str) -> Path:
    path = folder / "hearth.toml"
    path.write_text(text)
    return path


def refused(**arguments: object) -> HearthError:
    with pytest.raises(HearthError) as caught:
        load_settings(**arguments)  # type: ignore[arg-type] # each test gives its own
    return caught.value


def test_defaults_without_any_source(tmp_path: Path) -> None:
    assert load_settings(environ={}, system_file=tmp_path / "none.toml") == Settings()


def test_flags_win_over_environment_and_that_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "threads = 1\nmax_batch = 1\ncapacity = 1\nhold_s = 4")
    environ = {"HEARTH_MAX_BATCH": "2", "HEARTH_CAPACITY": "2"}
    settings = load_settings(path, environ, {"capacity": "3", "threads": None})
    assert settings == settings_of(threads=1, max_batch=2, capacity=3, hold_s=4.0)


def test_the_file_is_the_flag_s_then_the_variable_s_then_the_system_s(tmp_path: Path) -> None:
    system = write(tmp_path, "threads = 1")
    named = tmp_path / "named.toml"
    named.write_text("threads = 2")
    given_file = tmp_path / "given.toml"
    given_file.write_text("threads = 3")
    environ = {"HEARTH_CONFIG": str(named)}
    assert load_settings(environ={}, system_file=system).runtime.threads == 1
    assert load_settings(environ=environ, system_file=system).runtime.threads == 2
    assert load_settings(given_file, environ, system_file=system).runtime.threads == 3


def test_a_system_s_file_that_may_not_be_read_is_told_and_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = tmp_path / "hearth.toml"

    def closed(path: Path, *_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    # Whatever user runs this: its folder is closed.
    monkeypatch.setattr(Path, "is_file", closed)
    monkeypatch.setattr(Path, "read_text", closed)
    with pytest.raises(HearthError, match=r"hearth\.toml cannot be read: Permission denied"):
        load_settings(environ={}, system_file=system)


@pytest.mark.parametrize(
    ("text", "field", "words"),
    [
        ("max_batch = -1", "max_batch", "a whole number from 0 to 1024"),
        ("max_batch = '8'", "max_batch", "a whole number"),
        ("max_batch = true", "max_batch", "a whole number"),
        ("hold_s = nan", "hold_s", "a number above 0 to 3600"),
        ("hold_s = inf", "hold_s", "a number above 0 to 3600"),
        ("log_level = 'loud'", "log_level", "one of debug, error, info, warning"),
        ("spin = 1", "spin", "true or false"),
        ("batch = 8", "batch", "no such setting"),
        ("[engine]\npath = 'x'", "engine", "text"),
    ],
)
def test_a_wrong_value_names_field_file_and_what_is_allowed(
    tmp_path: Path, text: str, field: str, words: str
) -> None:
    path = write(tmp_path, text)
    error = refused(config=path, environ={})
    assert error.code == "invalid_value"
    assert error.field == field
    assert str(path) in error.message
    assert words in error.message


def test_a_wrong_variable_or_flag_is_named_as_its_user_wrote_it() -> None:
    assert "$HEARTH_HOLD_S" in refused(environ={"HEARTH_HOLD_S": "soon"}).message
    assert "$HEARTH_HOLDS" in refused(environ={"HEARTH_HOLDS": "1"}).message
    assert "--hold-s" in refused(environ={}, flags={"hold_s": "soon"}).message


@given(st.sampled_from(sorted(SETTINGS)), st.text(max_size=12))
def test_any_text_is_a_value_or_is_refused_by_name(name: str, value: str) -> None:
    try:
        load_settings(environ={}, flags={name: value})
    except HearthError as error:
        field = error.field
    else:
        field = name
    assert field == name


@pytest.mark.parametrize(
    ("environ", "text", "hint"),
    [
        ({}, "max_bacth = 2", "max_bacth: there is no such setting (nearest: max_batch)"),
        (
            {"HEARTH_THREAD": "2"},
            "",
            "$HEARTH_THREAD: there is no such setting (nearest: HEARTH_THREADS)",
        ),
        # What all names begin with makes none of them near.
        ({"HEARTH_PROXY": "8080"}, "", "$HEARTH_PROXY: there is no such setting"),
        ({"HEARTH_XYZ": "1"}, "", "$HEARTH_XYZ: there is no such setting"),
    ],
)
def test_the_nearest_name_of_an_unknown_setting_is_told(
    tmp_path: Path, environ: dict[str, str], text: str, hint: str
) -> None:
    path = tmp_path / "h.toml"
    path.write_text(text)
    with pytest.raises(HearthError) as caught:
        load_settings(path, environ)
    assert caught.value.message.endswith(hint)


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


VERSION_0_1_0 = """\
engine "" restarts text
weights "" reloads text
engine_kind "auto" restarts one of auto, kernels, onnxruntime, simulated, tensorrt
device "auto" restarts one of auto, cpu, cuda
step_ms 0.0 restarts a number from 0 to 60000
prefill_us 0.0 restarts a number from 0 to 1000000
socket "" restarts text
tcp_port 0 restarts a whole number from 0 to 65535
keys "" restarts text
adapters "" restarts text
threads 0 restarts a whole number from 0 to 1024
spin false restarts true or false
verify true restarts true or false
max_batch 0 restarts a whole number from 0 to 1024
capacity 0 restarts a whole number from 0 to 1048576
speculation "auto" restarts one of auto, eagle, lookup, off
drafting_top_k 0 restarts a whole number from 0 to 128
drafting_step 0 restarts a whole number from 0 to 30
verify_tree_size 0 restarts a whole number from 0 to 128
lookup_tokens 0 restarts a whole number from 0 to 30
batching "joining" reloads one of joining, synchronous
prefill_budget 1.0 restarts a number above 0 to 1000
fill_wait_ms 5.0 reloads a number from 0 to 1000
hold_s 30.0 reloads a number above 0 to 3600
adapter_turn_ms 500.0 reloads a number above 0 to 3600000
ageing_s 5.0 restarts a number above 0 to 3600
queue_requests 256 reloads a whole number from 1 to 1048576
queue_tokens 65536 reloads a whole number from 1 to 1073741824
client_queue_share 0.75 reloads a number above 0 to 1
clients 64 reloads a whole number from 1 to 4096
requests_per_client 64 reloads a whole number from 1 to 4096
lease_s 30.0 reloads a number from 1 to 3600
client_memory_mb 512 reloads a whole number from 64 to 1048576
images_per_request 64 restarts a whole number from 1 to 4096
image_tokens 0 restarts a whole number from 0 to 1048576
image_bytes 33554432 restarts a whole number from 65536 to 1073741824
images_in_flight_bytes 134217728 restarts a whole number from 1048576 to 68719476736
image_cache_bytes 268435456 restarts a whole number from 1048576 to 68719476736
encoder_nice 10 restarts a whole number from 0 to 19
encoder_threads 0 restarts a whole number from 0 to 1024
image_decode_timeout_s 10.0 restarts a number above 0 to 3600
image_decode_memory_bytes 1073741824 restarts a whole number from 67108864 to 68719476736
prefix_cache_bytes 268435456 restarts a whole number from 0 to 1099511627776
prefix_host_bytes 0 restarts a whole number from 0 to 1099511627776
prefix_disk_bytes 0 restarts a whole number from 0 to 17592186044416
prefix_folder "" restarts text
drain_s 5.0 reloads a number from 0 to 3600
load_timeout_s 300.0 reloads a number above 0 to 86400
progress_timeout_s 60.0 reloads a number above 0 to 86400
restart_limit 3 reloads a whole number from 0 to 100
metrics_port 0 restarts a whole number from 0 to 65535
metrics_socket "" restarts text
traces "off" restarts one of off, otlp
log_level "info" reloads one of debug, error, info, warning
log_format "auto" restarts one of auto, console, json
"""


GONE = {"drafting_top_k", "drafting_step", "verify_tree_size"}
NEW = {
    'draft_tree "" restarts empty, or three whole numbers such as 10x6/60',
    'reply_format "" restarts text',
}


def test_names_defaults_units_and_ranges_are_those_that_users_type() -> None:
    now = {
        f"{one.name} {shown(one.default)} "
        f"{'reloads' if one.declared.reloads else 'restarts'} "
        f"{allowed(one.type, one.declared.form)}"
        for one in SETTINGS.values()
    }
    then = [line for line in VERSION_0_1_0.splitlines() if line.split()[0] not in GONE]
    assert now == {*then, *NEW}


def test_a_name_is_a_flag_and_a_variable_by_one_rule() -> None:
    assert (flag_of("hold_s"), variable_of("hold_s")) == ("--hold-s", "HEARTH_HOLD_S")


WHOLE = {"drafting_top_k": "4", "drafting_step": "3", "verify_tree_size": "16"}
TREE = EagleDraftingConfig(drafting_top_k=4, drafting_step=3, verify_tree_size=16)


def refusal(**flags: str) -> HearthError:
    with pytest.raises(HearthError) as caught:
        load_settings(environ={}, flags=flags)
    assert caught.value.code == "invalid_value"
    return caught.value


def test_a_tree_is_one_setting() -> None:
    settings = load_settings(environ={"HEARTH_DRAFT_TREE": "4x3/16"})
    assert settings == settings_of(draft_tree=TREE)
    assert settings.runtime.speculation.eagle == TREE
    assert load_settings(environ={}, flags={"draft_tree": ""}) == settings_of()


@pytest.mark.parametrize(
    "text", ["4x3", "4x3/", "4/3x16", "4x3/16 ", "-4x3/16", "0x3/16", "4x31/16", "4x3/129", "auto"]
)
def test_what_is_no_tree_is_refused_with_one_that_is(text: str) -> None:
    error = refusal(draft_tree=text)
    assert error.field == "draft_tree"
    assert "--draft-tree" in error.message
    assert "such as 10x6/60" in error.message


def test_a_tree_that_no_engine_grows_is_refused_with_the_reason() -> None:
    assert "not allowed (step must be below 31)" in refusal(draft_tree="4x31/16").message
    assert "not allowed (a tree has 2 to 128 nodes)" in refusal(draft_tree="4x3/1").message
    assert "not allowed, it" in refusal(draft_tree="auto").message


def test_a_number_of_the_file_is_no_tree(tmp_path: Path) -> None:
    path = tmp_path / "h.toml"
    path.write_text("draft_tree = 4")
    with pytest.raises(HearthError, match="draft_tree: 4 is not allowed"):
        load_settings(path, {})


def test_its_sizes_are_taken_with_a_warning_that_has_the_new_name(tmp_path: Path) -> None:
    path = tmp_path / "h.toml"
    path.write_text("drafting_top_k = 4\ndrafting_step = 9")
    environ = {"HEARTH_DRAFTING_STEP": "3"}
    settings = load_settings(path, environ, {"verify_tree_size": "16"})
    assert structs.replace(settings, warnings=()) == settings_of(draft_tree=TREE)
    (warning,) = settings.warnings
    assert warning.endswith('give draft_tree = "4x3/16"')


def test_sizes_of_zero_are_as_if_they_were_not_given() -> None:
    settings = load_settings(environ={}, flags=dict.fromkeys(OLD_NAMES, "0"))
    assert settings.runtime.speculation.eagle is None
    assert settings.warnings


@pytest.mark.parametrize("name", OLD_NAMES)
def test_an_old_size_of_zero_leaves_the_new_name_as_it_is(name: str) -> None:
    settings = load_settings(environ={}, flags={name: "0", "draft_tree": "4x3/16"})
    assert settings.runtime.speculation.eagle == TREE
    assert 'draft_tree = "4x3/16"' in settings.warnings[0]


@pytest.mark.parametrize("missing", OLD_NAMES)
def test_a_tree_that_is_given_in_part_is_refused(missing: str) -> None:
    error = refusal(**{**WHOLE, missing: "0"})
    assert "together" in error.message
    assert error.field == missing


@pytest.mark.parametrize("name", OLD_NAMES)
def test_an_old_name_beside_the_new_one_is_refused_where_it_stands(name: str) -> None:
    error = refusal(**{name: "4", "draft_tree": "4x3/16"})
    assert error.message.startswith("--" + name.replace("_", "-"))
    assert error.field == name


@pytest.mark.parametrize(("name", "most"), [("drafting_top_k", 128), ("drafting_step", 30)])
def test_the_largest_of_each_size_is_an_option(name: str, most: int) -> None:
    assert "from 0 to" in refusal(**{**WHOLE, name: str(most + 1)}).message
    settings = load_settings(environ={}, flags={**WHOLE, name: str(most)})
    check_speculation(settings.runtime.speculation)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("engine", "text"),
        ("verify", "true or false"),
        ("threads", "a whole number from 0 to 1024"),
        ("drain_s", "a number from 0 to 3600"),
        ("hold_s", "a number above 0 to 3600"),
        ("log_format", "one of auto, console, json"),
    ],
)
def test_what_is_allowed(name: str, words: str) -> None:
    assert allowed(SETTINGS[name].type) == words


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_is_described_in_a_sentence(name: str) -> None:
    assert SETTINGS[name].declared.description.endswith(".")


def test_defaults_are_shown_as_a_file_has_them() -> None:
    assert [shown(value) for value in (True, 8, 2.5, "auto")] == ["true", "8", "2.5", '"auto"']
