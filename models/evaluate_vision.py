"""Exact match by group on held-out questions about pictures.

`python -m models.evaluate_vision` asks the daemon, which serves an engine of the vision variant;
`--folder models/home-vision` loads the folder with transformers instead, and can leave out a part.
"""

import argparse
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np

from hearth_client import Client, Image
from models.vision.questions import Prompt, held_out_prompts, score, table

WHOLE: Final = "whole"
MAX_TOKENS: Final = 32
_GREY: Final = 128


def blanked(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the same questions about grey pictures."""
    return [p._replace(pixels=np.full_like(p.pixels, _GREY)) for p in prompts]


def wrong(prompts: Sequence[Prompt], answers: Sequence[str]) -> str:
    """Return the wrong answers beside the right ones."""
    return "\n".join(
        f"{p.group}: {p.text}\n  wanted {p.expected}\n  got    {answer}"
        for p, answer in zip(prompts, answers, strict=True)
        if answer.strip() != p.expected
    )


def through_daemon(prompts: Sequence[Prompt], threads: int, socket: Path | None) -> list[str]:
    """Return the daemon's answers, in order, with several questions under way at once."""

    def answer(prompt: Prompt) -> str:
        picture = Image(memoryview(prompt.pixels), "rgb8")  # type: ignore[arg-type] # before 3.12
        turns = [{"role": "user", "content": [picture, prompt.text]}]
        with Client(socket) as client:
            return client.generate(messages=turns, max_tokens=MAX_TOKENS, temperature=0).text()

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(answer, prompts))


def _in_process(prompts: list[Prompt], folder: Path, part: str) -> list[str]:
    from models.vision.exam import Lack, answers_of  # noqa: PLC0415 - it needs torch

    answers: list[str] = answers_of(folder, prompts, Lack(part))
    return answers


def main() -> None:
    """Print the scores, and the wrong answers if asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="load this folder instead of asking the daemon")
    parser.add_argument("--socket", type=Path, help="the daemon's")
    parser.add_argument("--each", type=int, default=150, help="questions of each group")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--wrong", action="store_true", help="print the wrong answers")
    parser.add_argument("--json", action="store_true", help="print the shares of each group alone")
    parts = (WHOLE, "blank", "no deepstack", "shuffled")
    parser.add_argument("--ask", choices=parts, default=WHOLE, help="the last two need --folder")
    flags = parser.parse_args()
    prompts = held_out_prompts(flags.each)
    shown = blanked(prompts) if flags.ask == "blank" else prompts
    if flags.folder:
        answers = _in_process(prompts, flags.folder, flags.ask)
    elif flags.ask in parts[:2]:
        answers = through_daemon(shown, flags.threads, flags.socket)
    else:
        parser.error(f"--ask {flags.ask!r} needs --folder")
    if flags.wrong:
        print(wrong(prompts, answers))
    found = score(prompts, answers)
    shares = {group: one.share for group, one in found.items()}
    print(json.dumps(shares) if flags.json else table({flags.ask: found}))


if __name__ == "__main__":
    main()
