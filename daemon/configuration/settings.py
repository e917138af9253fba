"""The daemon's settings: one struct, which `load` reads from file, environment and flags."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that an operator may choose; times in seconds unless the name says otherwise."""

    engine: Annotated[
        str, Meta(description="Engine folder to serve; empty for the shipped model.")
    ] = ""
    weights: Annotated[
        str,
        Meta(
            description="File of external weights, from `hearth weights`, to serve in place of the "
            "engine folder's own; empty for these."
        ),
    ] = ""
    engine_kind: Annotated[
        Literal["auto", "kernels", "onnxruntime", "simulated", "tensorrt"],
        Meta(
            description="What runs the engine; `auto` is what the folder was exported for, "
            "`simulated` is for benches and fault tests only."
        ),
    ] = "auto"
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Meta(
            description="Where the engine runs; `auto` is the device it was exported for, of the "
            "shipped model the CPU. There is no fallback: what cannot run there is refused."
        ),
    ] = "auto"
    step_ms: Annotated[
        float,
        Meta(ge=0, le=60_000, description="Milliseconds that a step of a simulated engine takes."),
    ] = 0.0
    prefill_us: Annotated[
        float,
        Meta(ge=0, le=1_000_000),
        Meta(
            description="Microseconds that each token of a prefill, padding included, adds to a "
            "step of a simulated engine."
        ),
    ] = 0.0
    socket: Annotated[
        str,
        Meta(
            description="Path of the socket; empty for $RUNTIME_DIRECTORY/hearth.sock, else "
            "$XDG_RUNTIME_DIR/hearth/hearth.sock, else /run/hearth/hearth.sock."
        ),
    ] = ""
    tcp_port: Annotated[
        int,
        Meta(ge=0, le=65535),
        Meta(
            description="Port of 127.0.0.1 that serves clients whose keys are listed, by CURVE; 0 "
            "for none."
        ),
    ] = 0
    keys: Annotated[
        str,
        Meta(
            description="Folder of the keys for it, which `hearth keys` keeps; empty for "
            "$STATE_DIRECTORY/keys, else $XDG_CONFIG_HOME/hearth/keys, else ~/.config/hearth/keys."
        ),
    ] = ""
    adapters: Annotated[
        str,
        Meta(
            description="Folder of the adapters, which `hearth adapter` keeps; empty for "
            "$STATE_DIRECTORY/adapters, else $XDG_STATE_HOME/hearth/adapters, else "
            "~/.local/state/hearth/adapters."
        ),
    ] = ""
    threads: Annotated[
        int, Meta(ge=0, le=1024, description="Threads of the engine; 0 for all physical cores.")
    ] = 0
    spin: Annotated[
        bool,
        Meta(
            description="Let engine threads spin for as long as a step lasts while they wait: "
            "faster on an idle machine, far slower beside busy neighbours."
        ),
    ] = False
    verify: Annotated[
        bool,
        Meta(
            description="Check the digest of every file of the engine folder at start, and the "
            "engine's known answer."
        ),
    ] = True
    max_batch: Annotated[
        int,
        Meta(ge=0, le=1024),
        Meta(
            description="Rows that run together; 0 for as many as fit into memory, up to the "
            "engine's limit."
        ),
    ] = 0
    capacity: Annotated[
        int,
        Meta(ge=0, le=1 << 20),
        Meta(
            description="Tokens a row may hold, prompt and reply together, a few of which "
            "speculation takes; 0 for as many as fit into memory, up to the engine's limit."
        ),
    ] = 0
    speculation: Annotated[
        Literal["off", "auto", "lookup", "eagle"],
        Meta(
            description="How several tokens a step are tried; it changes the speed, and the "
            "text at near-ties alone. `auto` takes the engine folder's draft, else `lookup`, which "
            "goes on as the reply's own text did before. It pauses by itself where it loses time."
        ),
    ] = "auto"
    drafting_top_k: Annotated[
        int,
        Meta(ge=0, le=128),
        Meta(
            description="Tokens that the draft proposes after each token; 0 for what suits the "
            "device."
        ),
    ] = 0
    drafting_step: Annotated[
        int,
        Meta(ge=0, le=30),
        Meta(description="Tokens that the draft looks ahead; 0 for what suits the device."),
    ] = 0
    verify_tree_size: Annotated[
        int,
        Meta(ge=0, le=128),
        Meta(
            description="Nodes of the token tree that one step verifies, the newest token "
            "included; 0 for what suits the device."
        ),
    ] = 0
    lookup_tokens: Annotated[
        int,
        Meta(ge=0, le=30),
        Meta(description="Tokens that `lookup` proposes at most; 0 for what suits the engine."),
    ] = 0
    batching: Annotated[
        Literal["joining", "synchronous"],
        Meta(
            description="`joining`: a request takes any place that is free, between two steps of "
            "the others. `synchronous`: a batch keeps the requests that it began with until all "
            "have ended, at most for `hold_s` where others wait."
        ),
    ] = "joining"
    prefill_budget: Annotated[
        float,
        Meta(gt=0, le=1000),
        Meta(
            description="By how much a piece of another's prompt may take longer than a step of "
            "the replies that wait for it, in steps; a longer prompt is taken in pieces."
        ),
    ] = 1.0
    fill_wait_ms: Annotated[
        float,
        Meta(ge=0, le=1000),
        Meta(
            description="Milliseconds an idle executor waits for more rows, unless requests have "
            "long come one at a time."
        ),
    ] = 5.0
    hold_s: Annotated[
        float,
        Meta(gt=0, le=3600),
        Meta(
            description="How long a reply may hold its place while others wait and none is free; "
            "it then pauses and continues later."
        ),
    ] = 30.0
    adapter_turn_ms: Annotated[
        float,
        Meta(gt=0, le=3_600_000),
        Meta(
            description="Milliseconds for which the requests of one adapter keep all places while "
            "others wait for another one, or have none; fewer of them give way earlier."
        ),
    ] = 500.0
    ageing_s: Annotated[
        float,
        Meta(gt=0, le=3600),
        Meta(description="Waiting time after which a request counts as one priority higher."),
    ] = 5.0
    queue_requests: Annotated[
        int, Meta(ge=1, le=1 << 20, description="Requests that may wait; more are refused.")
    ] = 256
    queue_tokens: Annotated[
        int, Meta(ge=1, le=1 << 30, description="Prompt tokens that may wait; more are refused.")
    ] = 65536
    client_queue_share: Annotated[
        float,
        Meta(gt=0, le=1),
        Meta(
            description="The share of what may wait, in requests and prompt tokens, that one "
            "client takes at most; less where others wait too, so that there is room for newcomers."
        ),
    ] = 0.75
    clients: Annotated[
        int, Meta(ge=1, le=4096, description="Clients that may be connected at once.")
    ] = 64
    requests_per_client: Annotated[
        int, Meta(ge=1, le=4096, description="Requests that one client may have open.")
    ] = 64
    lease_s: Annotated[
        float,
        Meta(ge=1, le=3600),
        Meta(description="Silence after which a client counts as gone and its requests end."),
    ] = 30.0
    client_memory_mb: Annotated[
        int,
        Meta(ge=64, le=1 << 20),
        Meta(
            description="MiB that clients' connections may take together, of messages that are not "
            "whole and of answers that are not taken; above, the one that takes most is closed. By "
            "as much the process may grow, else what came by TCP is closed."
        ),
    ] = 512
    images_per_request: Annotated[
        int,
        Meta(ge=1, le=4096),
        Meta(description="Pictures of one request, those of videos among them; more are refused."),
    ] = 64
    image_tokens: Annotated[
        int,
        Meta(ge=0, le=1 << 20),
        Meta(
            description="Tokens that one picture becomes at most: a larger one is made smaller. 0 "
            "for half of the longest prompt."
        ),
    ] = 0
    image_bytes: Annotated[
        int,
        Meta(ge=1 << 16, le=1 << 30),
        Meta(description="Bytes of one picture as a client sends it; larger ones are refused."),
    ] = 32 << 20
    images_in_flight_bytes: Annotated[
        int,
        Meta(ge=1 << 20, le=1 << 36),
        Meta(description="Bytes of the pictures of all open requests; more are refused."),
    ] = 128 << 20
    image_cache_bytes: Annotated[
        int,
        Meta(ge=1 << 20, le=1 << 36),
        Meta(
            description="Bytes of embeddings that are kept in case their picture comes again; "
            "those of open requests stay, and what finds no room beside them is refused."
        ),
    ] = 256 << 20
    encoder_nice: Annotated[
        int,
        Meta(ge=0, le=19),
        Meta(description="By how much the encoder's processes give way to text (nice(2))."),
    ] = 10
    encoder_threads: Annotated[
        int,
        Meta(ge=0, le=1024),
        Meta(description="Threads of a vision tower on the CPU; 0 for all physical cores."),
    ] = 0
    image_decode_timeout_s: Annotated[
        float,
        Meta(gt=0, le=3600, description="How long one picture may take to be decoded."),
    ] = 10.0
    image_decode_memory_bytes: Annotated[
        int,
        Meta(ge=1 << 26, le=1 << 36),
        Meta(description="Bytes of memory that the process which decodes pictures may take."),
    ] = 1 << 30
    prefix_cache_bytes: Annotated[
        int,
        Meta(ge=0, le=1 << 40),
        Meta(
            description="Bytes at most of the memory in which the engine works that keep the "
            "beginnings of prompts, so that what begins alike is computed once; 0 for none."
        ),
    ] = 256 << 20
    prefix_host_bytes: Annotated[
        int,
        Meta(ge=0, le=1 << 40),
        Meta(
            description="Bytes at most of the host's memory, pinned, for what finds no room there; "
            "on a GPU alone."
        ),
    ] = 0
    prefix_disk_bytes: Annotated[
        int,
        Meta(ge=0, le=1 << 44),
        Meta(
            description="Bytes of `prefix_folder` for what finds no room in memory, which is there "
            "after a restart as well; 0 for none. They hold what prompts said, readable by the "
            "daemon's user alone."
        ),
    ] = 0
    prefix_folder: Annotated[
        str,
        Meta(
            description="Folder for it; empty for $HEARTH_CACHE/prefix, else "
            "$XDG_CACHE_HOME/hearth/prefix, else ~/.cache/hearth/prefix."
        ),
    ] = ""
    drain_s: Annotated[
        float,
        Meta(ge=0, le=3600, description="How long running requests may finish after a stop."),
    ] = 5.0
    load_timeout_s: Annotated[
        float, Meta(gt=0, le=86400, description="How long the engine may take to load.")
    ] = 300.0
    progress_timeout_s: Annotated[
        float,
        Meta(gt=0, le=86400),
        Meta(description="How long one engine step may take before the executor counts as hung."),
    ] = 60.0
    restart_limit: Annotated[
        int,
        Meta(ge=0, le=100),
        Meta(description="Restarts of a lost executor in a row before the daemon gives up."),
    ] = 3
    metrics_port: Annotated[
        int,
        Meta(ge=0, le=65535),
        Meta(description="Port of 127.0.0.1 that serves metrics to Prometheus; 0 for none."),
    ] = 0
    metrics_socket: Annotated[
        str, Meta(description="Path of a socket that serves the same; empty for none.")
    ] = ""
    traces: Annotated[
        Literal["off", "otlp"],
        Meta(description="`otlp` sends spans of each request to a collector."),
    ] = "off"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="The least important events that are logged."),
    ] = "info"
    log_format: Annotated[
        Literal["auto", "console", "json"],
        Meta(
            description="`auto` is console on a terminal, fields under journald, else JSON lines."
        ),
    ] = "auto"


FIELDS: dict[str, msgspec.structs.FieldInfo] = {
    field.name: field for field in msgspec.structs.fields(Settings)
}

_EVERYDAY = [
    *("engine", "weights", "device", "socket", "tcp_port", "keys", "adapters", "threads"),
    *("max_batch", "capacity", "speculation", "clients", "drain_s", "metrics_port"),
    *("metrics_socket", "traces", "log_level", "log_format"),
]
_SIMULATED = ["step_ms", "prefill_us"]
GROUPS: dict[str, list[str]] = {
    "Settings": _EVERYDAY,
    "Settings for experts": [name for name in FIELDS if name not in {*_EVERYDAY, *_SIMULATED}],
    "Settings of simulated engines, for benches and tests": _SIMULATED,
}
"""All names, those first that most people need."""
