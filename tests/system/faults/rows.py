"""The table of faults: what is done to a daemon, and what it has to keep to."""

from collections.abc import Callable
from typing import NamedTuple

from tests.system.faults import (
    adapters,
    bad_pictures,
    clients,
    ends,
    executor,
    identities,
    inputs,
    vision_faults,
    weights,
)
from tests.system.faults.trial import Trial


class Row(NamedTuple):
    """One fault or bad input: `limit` says when it counts as survived, `run` tries it."""

    name: str
    what: str
    limit: str
    run: Callable[[Trial], None]


HELD = (
    Row(
        "Images under load",
        "4 clients, 24 pictures of 1 MB at once where 6 MB are held",
        "text goes on while pictures are encoded; what is above the bytes in flight is refused, "
        "and each request gets one answer",
        vision_faults.images_under_load,
    ),
    Row(
        "Equal clients, and a light one",
        "8 clients of equal demand that almost fill 8 places, at random; then one that asks beside "
        "16 long replies of another",
        "first tokens and whole replies at the 99th percentile, and the longest, within 1.3 of "
        "first come, first served; no stream stands still for 1 s; the light one has each first "
        "token within 2 s",
        clients.equal_clients,
    ),
)
FAULTS = (
    Row(
        "Client killed in mid-stream",
        "kill -9 of a client beside another one",
        "its place is free within its lease (2 s), the other reply is the same token for token",
        clients.client_killed,
    ),
    Row(
        "Client stops reading",
        "a client that asks for a reply and long texts, and reads nothing",
        "its reply ends as slow_client within 30 s, the daemon grows by 100 MB at most, the other "
        "reply is the same",
        clients.client_stops_reading,
    ),
    Row(
        "Client reconnects with the same identity",
        "a second connection with the routing id of one whose reply streams, and a third later",
        "each is served as if it had none; no answer reaches another",
        identities.same_identity,
    ),
    Row(
        "Raw identity",
        "400 connections that name themselves as libzmq names its own, beside a reply",
        "the daemon runs, the reply is the same token for token, a new client is served",
        identities.raw_identity,
    ),
    Row(
        "Session taken over",
        "a client leaves while its request waits; others come with its routing id, without hello",
        "its place is free within 1 s; they hear hello_required and nothing else",
        identities.taken_over,
    ),
    Row(
        "Key removed",
        "two keys on TCP with a reply each; one is taken off the list, and one more connection of "
        "it names itself",
        "its reply ends with not_allowed and it hears nothing later, the other's is whole; who "
        "names itself is refused with unsupported_option",
        identities.key_removed,
    ),
    Row(
        "Places taken",
        "one user takes all 8 places with leases of an hour, and replies stream for two of them; "
        "a client with a key comes by TCP",
        "no place for more of the first user; the other one is served within 1 s in place of one "
        "that was idle, which is told hello_required",
        clients.places_taken,
    ),
    Row(
        "Flood",
        "another process sends messages of 7 kinds that cost the daemon much, as fast as they are "
        "taken, beside a stream; then it burns as much CPU and sends nothing",
        "the stream has nine tenths of the tokens a second that it has beside the latter, and no "
        "gap above 150 ms",
        clients.flood,
    ),
    Row(
        "GPU actor killed",
        "kill -9 of the executor in decode, in two stages of its start, in prefill, and behind "
        "the last restart",
        "open requests end with executor_failed within 1 s, waiting ones run later, not ready "
        "meanwhile, replaced, at last exit code 69",
        executor.executor_killed,
    ),
    Row(
        "GPU actor hangs",
        "SIGSTOP of the executor, for less than its limit and for good",
        "a pause of 1 s of 3 changes nothing; then executor_failed within the limit and 1 s, and "
        "it is replaced",
        executor.executor_hangs,
    ),
    Row(
        "Executor raises",
        "a step without memory, a step with a wrong shape, and no step that can be captured",
        "the batch concerned alone fails, within 1 s; who waits follows in the same process; "
        "steps run uncaptured, and that is counted",
        executor.executor_raises,
    ),
    Row(
        "Adapter removed, executor killed with one",
        "an adapter is removed while 4 requests wait for it beside a reply without one; kill -9 of "
        "the executor while another adapter has all places and two requests wait",
        "those that waited for it end with adapter_unknown within 1 s, the reply goes on; those "
        "that ran end with executor_failed within 1 s, those that waited are answered as before, "
        "with the adapter and without; what was removed stays away",
        adapters.adapters_and_who_waits,
    ),
    Row(
        "Adapter of many tensors, few handles",
        "an adapter of 406 tensors, and 5 that are refused, beside a stream, where the daemon may "
        "have 1,024 handles",
        "it is served and the others are refused, with at most 16 handles more at any time; the "
        "stream goes on",
        adapters.many_tensors,
    ),
    Row(
        "Weights changed in place",
        "another model's file is written over the one that is served, beside a reply that runs "
        "(a real engine)",
        "noticed within 1.5 s and named in status; the reply that runs ends with executor_failed, "
        "whoever comes later waits and gets the other model's reply in whole",
        weights.weights_changed,
    ),
    Row(
        "Weights cut short",
        "the file that is served is cut to its half for 5 s, beside a reply that runs, with one "
        "restart allowed; then it is whole again; a start on the half (a real engine)",
        "noticed within 1.5 s and named in status; weights_invalid, one vain start at the most; "
        "once whole replies are as before; exit code 78 of the start",
        weights.weights_cut,
    ),
    Row(
        "Tokenizer or encoder actor dies",
        "the tokenizer raises on 20 texts (it shares the daemon's process; of the encoder below)",
        "these requests end with internal, the reply beside them goes on",
        executor.text_fails,
    ),
    Row(
        "Encoder killed",
        "kill -9 of the encoder with 4 pictures under way, beside a text reply",
        "their requests end with encoder_failed within 1 s, the daemon stays ready, the reply goes "
        "on; pictures that are kept need no encoder, others are served by the next one",
        vision_faults.encoder_killed,
    ),
    Row(
        "Picture decoder killed",
        "kill -9 of the process that decodes, with 4 pictures in its hands",
        "one of them fails at most, as image_invalid; the others and a text reply go on",
        vision_faults.decoder_killed,
    ),
    Row(
        "Picture decoder hangs",
        "SIGSTOP of the process that decodes, where a picture may take 2 s",
        "image_timeout within 2 s and 1 s; who waited behind it is served, a text reply goes on",
        vision_faults.decoder_hangs,
    ),
    Row(
        "Same bad request twice",
        "max_tokens 0, twice",
        "the same refusal twice, naming the field; the next request is served",
        inputs.same_bad_request_twice,
    ),
    Row(
        "SIGTERM under load",
        "SIGTERM with drain_s 2 while replies stream",
        "short replies end, new and long ones end with shutting_down, exit code 0 within drain_s "
        "and 1 s, no socket is left",
        ends.terminated_under_load,
    ),
    Row(
        "SIGTERM twice, SIGINT, SIGHUP",
        "a reload by command and by SIGHUP as of a service manager, SIGTERM twice, SIGINT",
        "reloads lose no request; the second SIGTERM ends within 10 s with exit code 130, SIGINT "
        "drains and ends with 0",
        ends.signalled,
    ),
    Row(
        "Second daemon start",
        "hearth serve on the socket of one that serves",
        "exit code 1, one that names the first, whose reply goes on",
        ends.second_start,
    ),
    Row(
        "Stale socket, missing folder, read-only folder, path too long",
        "four starts",
        "the first two serve, the folder has mode 750; the others end with exit code 78, one line "
        "and no traceback",
        ends.wrong_places,
    ),
    Row(
        "Clock jump",
        "the clock of the wall goes a day ahead, back, and right again while a reply streams "
        "(libfaketime)",
        "the reply is the same, no lease and no deadline ends it",
        ends.clock_jumps,
    ),
    Row(
        "Handles used up, disk full for logs",
        "a log on /dev/full; 600 silent connections where 1,024 files are allowed",
        "20 requests are served and the lost lines counted; who asks beside the connections is "
        "served within 5 s, again if told that the connection was closed",
        ends.nothing_left,
    ),
    Row(
        "Start order",
        "a request before there is a daemon; a client that waits for 0.5 s",
        "the request is served once there is one; the client is told within 2 s",
        ends.client_first,
    ),
)
INPUTS = (
    Row(
        "Random bytes",
        "400 connections: random bytes, half-open ones, ZMTP 1.0 frames",
        "all are dropped, half-open ones in time, below 100 MB, the reply beside them is the same",
        inputs.random_bytes,
    ),
    Row(
        "Odd frames",
        "2 and 1,000 frames, empty ones, 1 GB announced, one above the limit, no last one",
        "each answered with its code or the connection dropped, below 100 MB, the reply beside "
        "them is served",
        inputs.odd_frames,
    ),
    Row(
        "Mutated messages",
        "5,000 messages of every kind of a client with bytes changed (300,000 in the suite)",
        "no internal error, below 100 MB, the reply beside them is served",
        inputs.mutated_messages,
    ),
    Row(
        "Wrong fields",
        "20 values out of range or of another type, deep nesting, invalid UTF-8",
        "each refused with the field's name within 1 s",
        inputs.wrong_fields,
    ),
    Row(
        "Prompt at the limit",
        "a prompt that just fits, a reply of one token more, a prompt above the limit",
        "served; capacity_exceeded; prompt_too_long",
        inputs.prompt_at_the_limit,
    ),
    Row(
        "Special tokens in user text",
        "the words of a special token in a message",
        "no special token comes of it",
        inputs.special_tokens,
    ),
    Row(
        "Images",
        "1x1, 1x10,000, 100 and 64 megapixels, a bomb in a text chunk, truncated, noise, wrong "
        "format, another size than declared, raw pixels too few",
        "refused where they are wrong, with the field and an error text of our own, each within "
        "10 s and 1 GB; a text reply beside them goes on",
        bad_pictures.bad_images,
    ),
    Row(
        "Images and their places",
        "more and fewer frames than parts, frame 0, the words of a placeholder in user text",
        "refused with the field before anything is decoded; no place comes of words",
        bad_pictures.pictures_and_places,
    ),
    Row(
        "Image for a text model",
        "a picture for a model that sees none",
        "unsupported_option, naming the part",
        bad_pictures.image_for_a_text_model,
    ),
    Row(
        "Unknown adapter, unsupported option",
        "lora, adapter, response_format, images, n",
        "each refused with its name",
        inputs.unknown_options,
    ),
    Row(
        "Pages on disk",
        "a daemon started anew with files of the prefix cache: whole, damaged, of another model, "
        "of another version, cut short",
        "whole ones are reused; of the others none, each is named in the log and removed; the "
        "reply is always the one without them; mode 600",
        weights.pages_on_disk,
    ),
    Row(
        "Message version",
        "hello with a newer, an older and no version, and with ours among newer ones",
        "unsupported_protocol twice, invalid_value, welcome",
        inputs.protocol_versions,
    ),
    Row(
        "Stop strings and cut characters",
        "stop strings across two tokens, replies that end at each of 29 lengths",
        "no text behind a stop string, every text a beginning of the whole one",
        inputs.stop_strings,
    ),
)
ROWS = (*HELD, *FAULTS, *INPUTS)
NOT_RUN = {
    "Abort races": "10,000 of them in tests/daemon/test_aborts.py, at every place a message can be",
    "Weights that do not fit": "tests/runtime/weights, before an engine is opened",
    "systemd": "tests/systemd, under a systemd of its own, which needs root",
}
"""Rows that are not tried here, and where they are."""
