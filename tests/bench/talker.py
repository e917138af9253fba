"""A process for the tests: says what its arguments tell it to, then echoes or hangs."""

import json
import sys
import time


def main() -> None:
    words, then = json.loads(sys.argv[1])
    print(words, end="", flush=True)  # noqa: T201 - what the test reads
    if then == "hang":
        time.sleep(600)  # longer than any test may take
    elif then == "echo":
        for line in sys.stdin:
            print(line, end="", flush=True)  # noqa: T201 - what the test reads


if __name__ == "__main__":
    main()
