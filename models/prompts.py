"""The held-out prompts for other programs: `python -m models.prompts`, one JSON object a line."""

import json

from models.splits import held_out


def main() -> None:
    """Print group, messages and expected answer of every prompt."""
    for prompt in held_out():
        print(json.dumps({key: getattr(prompt, key) for key in ("group", "messages", "expected")}))


if __name__ == "__main__":
    main()
