"""Exact match by group, in this process or through the daemon.

`python -m models.evaluate` asks the daemon; `--folder models/home` loads the folder with
transformers instead. `--adapter NAME` asks for a shipped adapter, and expects what it makes of
the answers.
"""

import argparse
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

from models.conversations import Message
from models.merge_adapter import write_merged
from models.rewordings import ADAPTERS, REWORDINGS, Rewording, reworded
from models.splits import Prompt, held_out

MAX_TOKENS: Final = 320

Answer = Callable[[list[Message]], str]


class Score(NamedTuple):
    """Number of prompts answered exactly, of a total."""

    right: int
    total: int

    @property
    def share(self) -> float:
        """Return the share of right answers."""
        return self.right / self.total if self.total else 0.0


def score(prompts: Sequence[Prompt], answers: Sequence[str]) -> dict[str, Score]:
    """Return the exact matches by group, and over all."""
    total = Counter(prompt.group for prompt in prompts)
    pairs = zip(prompts, answers, strict=True)
    right = Counter(p.group for p, answer in pairs if answer.strip() == p.expected)
    scores = {group: Score(right[group], total[group]) for group in sorted(total)}
    return {**scores, "all": Score(right.total(), total.total())}


def ask_all(prompts: Sequence[Prompt], answer: Answer, threads: int) -> list[str]:
    """Return the answers, in order, with several questions under way at once."""
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda prompt: answer(prompt.messages), prompts))


def report(scores: dict[str, Score]) -> str:
    """Return one line for each group."""
    return "\n".join(
        f"{group:12} {s.right:5} / {s.total:5}  {s.share:7.2%}" for group, s in scores.items()
    )


def wrong(prompts: Sequence[Prompt], answers: Sequence[str]) -> str:
    """Return the wrong answers beside the right ones."""
    return "\n".join(
        f"{p.group}: {p.messages[-1]['content']}\n  wanted {p.expected}\n  got    {answer}"
        for p, answer in zip(prompts, answers, strict=True)
        if answer.strip() != p.expected
    )


def reworded_prompt(prompt: Prompt, rewording: Rewording) -> Prompt:
    """Return the prompt as it is under an adapter, its earlier answers too."""
    last = {"role": "assistant", "content": prompt.expected}
    *messages, answer = reworded([*prompt.messages, last], rewording)
    return prompt._replace(messages=messages, expected=answer["content"])


def _through_daemon(prompts: Sequence[Prompt], threads: int, adapter: str) -> list[str]:
    from hearth_client import Client  # noqa: PLC0415 - one of two ways to get answers

    def answer(messages: list[Message]) -> str:
        with Client() as client:
            generation = client.generate(
                messages=messages, max_tokens=MAX_TOKENS, temperature=0, adapter=adapter
            )
            return generation.text()

    return ask_all(prompts, answer, threads)


def _in_process(prompts: Sequence[Prompt], folder: Path, adapter: str) -> list[str]:
    from models.folder import answers  # noqa: PLC0415 - it needs torch

    with tempfile.TemporaryDirectory() as scratch:
        if adapter:
            write_merged(folder, ADAPTERS / adapter, Path(scratch) / "merged")
            folder = Path(scratch) / "merged"
        return answers(folder, [prompt.messages for prompt in prompts], MAX_TOKENS)


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="load this folder instead of asking the daemon")
    parser.add_argument("--adapter", choices=list(REWORDINGS), default="")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--every", type=int, help="ask only every so-many-th prompt", default=1)
    parser.add_argument("--wrong", action="store_true", help="print the wrong answers")
    return parser.parse_args()


def main() -> None:
    """Print the scores, and the wrong answers if asked for."""
    flags = _flags()
    prompts = held_out()[:: flags.every]
    if flags.adapter:
        prompts = [reworded_prompt(one, REWORDINGS[flags.adapter]) for one in prompts]
    if flags.folder:
        answers = _in_process(prompts, flags.folder, flags.adapter)
    else:
        answers = _through_daemon(prompts, flags.threads, flags.adapter)
    if flags.wrong:
        print(wrong(prompts, answers))
    print(report(score(prompts, answers)))


if __name__ == "__main__":
    main()
