"""The process that is measured: `python -m bench.memory_main ENGINE_DIR`.

It writes the name of each stage as a line of JSON and goes on when it gets a line back.
"""

import sys
from pathlib import Path

from bench.memory_stages import build_in_stages
from bench.replies import Replies
from runtime.errors import HearthError


def main() -> None:
    """Build the engine of the folder stage by stage; a refusal is the last line."""
    replies = Replies()

    def tell(stage: str) -> None:
        replies.send(stage)
        sys.stdin.buffer.readline()

    tell("start")
    try:
        build_in_stages(Path(sys.argv[1]), tell)
    except HearthError as error:
        replies.send(f"refused: {error}")


if __name__ == "__main__":
    main()
