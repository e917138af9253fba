"""The process that is measured: `python -m daemon.bench.memory_main ENGINE_DIR`.

It writes the name of each stage as a line of JSON and goes on when it gets a line back.
"""

import os
import sys
from pathlib import Path

import msgspec

from daemon.bench.memory_stages import build_in_stages
from runtime.errors import HearthError


def main() -> None:
    """Build the engine of the folder stage by stage; a refusal is the last line."""
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    # Libraries that print must not end up between the replies.
    os.dup2(2, 1)

    def tell(stage: str) -> None:
        replies.write(msgspec.json.encode(stage) + b"\n")
        sys.stdin.buffer.readline()

    tell("start")
    try:
        build_in_stages(Path(sys.argv[1]), tell)
    except HearthError as error:
        replies.write(msgspec.json.encode(f"refused: {error}") + b"\n")


if __name__ == "__main__":
    main()
