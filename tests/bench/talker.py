"""A process for the tests: says what its arguments tell it to, then echoes or hangs."""

import sys
import time


def main() -> None:
    print(sys.argv[1], end="", flush=True)  # noqa: T201 - what the test reads
    if sys.argv[2] == "hang":
        time.sleep(600)  # longer than any test may take
    elif sys.argv[2] == "echo":
        for line in sys.stdin:
            print(line, end="", flush=True)  # noqa: T201 - what the test reads


if __name__ == "__main__":
    main()
