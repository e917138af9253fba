"""What the front door is told: limits by its settings, the model and the state by the daemon."""

import msgspec
from hearth_client.protocol import MAX_FRAME_BYTES


class DoorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the front door; sizes in bytes, times in seconds.

    `socket` empty means the agreed place; `tcp_port` counts where there are keys. A client does not
    read once `slow_bytes` of answers wait for it, or nothing could be sent to it for `slow_s`, or
    more than `unread_bytes` wait for all clients and the most of it for this one; `send_mark`
    answers lie with ZeroMQ on TCP, beside these. `answer_s` bounds the wait for other actors where
    a request sets no deadline of its own. Connections may take `memory_bytes` together (0 for any),
    of messages that are not whole and of answers that are not taken; on TCP, where ZeroMQ does not
    tell, the process may grow by that. A request may have `images` pictures of `image_bytes` each
    where the model sees, of `request_image_bytes` in all, which is what the arena of all clients
    has; `image_tokens` is what one becomes at most, 0 for half of the longest prompt.
    """

    socket: str = ""
    tcp_port: int = 0
    clients: int = 64
    requests_per_client: int = 64
    lease_s: float = 30.0
    queued_requests: int = 256
    queued_tokens: int = 65536
    client_queue_share: float = 0.75
    frame_bytes: int = MAX_FRAME_BYTES
    slow_bytes: int = 4 << 20
    slow_s: float = 10.0
    unread_bytes: int = 128 << 20
    answer_s: float = 30.0
    send_mark: int = 32
    receive_mark: int = 32
    handshake_s: float = 2.0
    memory_bytes: int = 512 << 20
    images: int = 0
    image_bytes: int = 0
    request_image_bytes: int = 0
    image_tokens: int = 0


class DoorFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What clients are told of the service, and how many generations run together (`places`).

    Lengths are in tokens. Requests may ask for one of `adapters`.
    """

    server: str
    model: str = ""
    prompt_tokens: int = 0
    total_tokens: int = 0
    places: int = 0
    engine: dict[str, str | int | float] = {}
    adapters: list[str] = []
