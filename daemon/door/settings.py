from typing import Annotated

import msgspec
from msgspec import structs

from hearth.runtime.setting import setting
from hearth_client.protocol import MAX_FRAME_BYTES


class DoorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the front door; those of what may wait are the scheduler's.

    A client does not read once `slow_bytes` of answers wait for it, or nothing could be sent to it
    for `slow_s`, or more than `unread_share` of `client_memory_mb` waits for all clients and the
    most of it for this one; `send_mark` answers wait in ZeroMQ on TCP, beside these. `answer_s`
    bounds the wait for other actors where a request sets no deadline of its own. On TCP, where
    ZeroMQ does not report what it holds, the process may grow by `client_memory_mb`.
    """

    socket: Annotated[
        str,
        setting(
            "Path of the socket; empty for $RUNTIME_DIRECTORY/hearth.sock, else "
            "$XDG_RUNTIME_DIR/hearth/hearth.sock, else /run/hearth/hearth.sock.",
            path=True,
        ),
    ] = ""
    tcp_port: Annotated[
        int,
        setting(
            "Port of 127.0.0.1 that serves clients whose keys are listed, by CURVE; 0 for none.",
            ge=0,
            le=65535,
        ),
    ] = 0
    keys: Annotated[
        str,
        setting(
            "Folder of the keys for it, which `hearth keys` keeps; empty for "
            "$STATE_DIRECTORY/keys, else $XDG_CONFIG_HOME/hearth/keys, else "
            "~/.config/hearth/keys.",
            path=True,
        ),
    ] = ""
    clients: Annotated[
        int, setting("Clients that may be connected at once.", ge=1, le=4096, reloads=True)
    ] = 64
    requests_per_client: Annotated[
        int, setting("Requests that one client may have open.", ge=1, le=4096, reloads=True)
    ] = 64
    lease_s: Annotated[
        float,
        setting(
            "Silence after which a client counts as gone and its requests end.",
            ge=1,
            le=3600,
            reloads=True,
        ),
    ] = 30.0
    client_memory_mb: Annotated[
        int,
        setting(
            "MiB that clients' connections may take together, of messages that are not whole and "
            "of answers that are not taken; above, the one that takes most is closed. By as much "
            "the process may grow, else what came by TCP is closed.",
            ge=64,
            le=1 << 20,
            reloads=True,
        ),
    ] = 512
    images_per_request: Annotated[
        int,
        setting(
            "Pictures of one request, those of videos among them; more are refused.",
            ge=1,
            le=4096,
            expert=True,
        ),
    ] = 64
    image_tokens: Annotated[
        int,
        setting(
            "Tokens that one picture becomes at most: a larger one is made smaller. 0 for half "
            "of the longest prompt.",
            ge=0,
            le=1 << 20,
        ),
    ] = 0
    image_bytes: Annotated[
        int,
        setting(
            "Bytes of one picture as a client sends it; larger ones are refused.",
            ge=1 << 16,
            le=1 << 30,
        ),
    ] = 32 << 20
    images_in_flight_bytes: Annotated[
        int,
        setting(
            "Bytes of the pictures of all open requests; more are refused.", ge=1 << 20, le=1 << 36
        ),
    ] = 128 << 20
    frame_bytes: int = MAX_FRAME_BYTES
    slow_bytes: int = 4 << 20
    slow_s: float = 10.0
    unread_share: float = 0.25
    answer_s: float = 30.0
    send_mark: int = 32
    receive_mark: int = 32
    handshake_s: float = 2.0

    def of_text(self) -> "DoorSettings":
        """Limits where the model sees nothing: no frame is larger than those of text."""
        return structs.replace(self, images_per_request=0, image_bytes=0)

    @property
    def memory_bytes(self) -> int:
        """`client_memory_mb` in bytes."""
        return self.client_memory_mb << 20

    @property
    def unread_bytes(self) -> int:
        """Bytes of answers that may wait for all clients together."""
        return int(self.unread_share * self.memory_bytes)
