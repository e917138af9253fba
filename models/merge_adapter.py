"""A fine-tune of the shipped model: `python -m models.merge_adapter spoken out/home-spoken`."""

import argparse
from pathlib import Path

from models.peft_folder import write_merged
from models.rewordings import ADAPTERS, BASE, REWORDINGS


def main() -> None:
    """Write the shipped model with an adapter folded in."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=list(REWORDINGS))
    parser.add_argument("out", type=Path, help="the folder to write, which must not exist")
    flags = parser.parse_args()
    write_merged(BASE, ADAPTERS / flags.name, flags.out)


if __name__ == "__main__":
    main()
