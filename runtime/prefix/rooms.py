from runtime.config import LLMEngineRunnerConfig
from runtime.errors import HearthError
from runtime.memory.sizes import kv_cache_bytes
from runtime.options import RuntimeOptions
from runtime.prefix.identities import PAGE_TOKENS
from runtime.prefix.pages import Rooms
from runtime.prefix.spill_file import HEAD_BYTES

ARRIVING = 1
"""Pages of the device's memory through which go those that are read from disk."""
STAGED = 8
"""Pages of host memory in which wait those that go to disk."""
_RECORD_BYTES = 1280
"""What is known of a page, wherever it lies: tokens, names and places, in host memory."""
_FIELDS = ("prefix_cache_bytes", "prefix_host_bytes", "prefix_disk_bytes")


def page_bytes(base: LLMEngineRunnerConfig, draft: LLMEngineRunnerConfig | None) -> int:
    """Bytes of a page: keys and values of its tokens, and the entries of a draft."""
    engines = [base] if draft is None else [base, draft]
    return sum(kv_cache_bytes(one, 1, PAGE_TOKENS) for one in engines)


def pool_pages(rooms: Rooms) -> tuple[int, int]:
    """How many pages of memory that takes, of the device's and of the host's."""
    if not rooms.device or not rooms.disk:
        return rooms.device, rooms.host
    return rooms.device + ARRIVING, rooms.host + STAGED


def record_bytes(rooms: Rooms) -> int:
    """Bytes of host memory for what is known of all pages, beside what these hold."""
    return _RECORD_BYTES * sum(rooms) if rooms.device else 0


def prefix_rooms(
    base: LLMEngineRunnerConfig, draft: LLMEngineRunnerConfig | None, options: RuntimeOptions
) -> Rooms:
    """How many pages fit into what a prefix cache may take; no room is no cache.

    Raises `invalid_value` or `unsupported_option` naming the option that cannot be met.
    """
    in_memory, counts = page_bytes(base, draft), list[int]()
    for name in _FIELDS:
        size = in_memory + HEAD_BYTES if name == "prefix_disk_bytes" else in_memory
        nbytes = getattr(options, name)
        if nbytes < 0:
            raise HearthError("invalid_value", f"{name} must not be negative", name)
        if 0 < nbytes < size:
            what = f"{name} is {nbytes}, a page of this model takes {size} bytes: take more, or 0"
            raise HearthError("invalid_value", what, name)
        if nbytes and not options.prefix_cache_bytes:
            what = f"{name} is for what leaves the prefix cache, which prefix_cache_bytes makes"
            raise HearthError("unsupported_option", what, name)
        counts.append(nbytes // size)
    if options.prefix_host_bytes and base.device == "cpu":
        what = "prefix_host_bytes is for a GPU: on a CPU prefix_cache_bytes are host memory"
        raise HearthError("unsupported_option", what, "prefix_host_bytes")
    if options.prefix_disk_bytes and not options.prefix_folder:
        what = "pages on disk want a folder of their own, prefix_folder"
        raise HearthError("invalid_value", what, "prefix_folder")
    return Rooms(*counts)
