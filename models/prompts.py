"""The held-out prompts for other programs: `python -m models.prompts`, one JSON object a line."""

import json

from models.splits import held_out


def main() -> None:
    """Print group, messages and expected answer of every prompt."""
    for prompt in held_out():
        print(json.dumps(prompt._asdict()))


if __name__ == "__main__":
    main()
