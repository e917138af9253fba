"""Names, defaults and ranges that users type, as version 0.1.0 had them."""

from hearth.daemon.configuration.settings import SETTINGS, flag_of, variable_of
from hearth.daemon.configuration.words import allowed, shown

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
NEW = 'draft_tree "" restarts empty, or three whole numbers such as 10x6/60'


def test_names_defaults_units_and_ranges_are_those_that_users_type() -> None:
    now = {
        f"{one.name} {shown(one.default)} "
        f"{'reloads' if one.declared.reloads else 'restarts'} "
        f"{allowed(one.type, one.declared.form)}"
        for one in SETTINGS.values()
    }
    then = [line for line in VERSION_0_1_0.splitlines() if line.split()[0] not in GONE]
    assert now == {*then, NEW}


def test_a_name_is_a_flag_and_a_variable_by_one_rule() -> None:
    assert (flag_of("hold_s"), variable_of("hold_s")) == ("--hold-s", "HEARTH_HOLD_S")
