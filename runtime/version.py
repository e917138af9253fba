"""The version of Hearth, as engine folders and the service state it, and versions of libraries."""

import re

VERSION = "0.1.0"


def version_numbers(text: str) -> tuple[int, ...]:
    """Up to three numbers of a version: (10, 0, 0) of "10.0.0b6"; more count packages of it."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])
