"""Exact match by group, in this process or through the daemon.

`python -m models.evaluate` asks the daemon; `--folder models/home` loads the folder with
transformers instead. `--adapter NAME` asks for a shipped adapter, and expects what it makes of
the answers.
"""

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

from models.conversations import Message
from models.merge_adapter import write_merged
from models.rewordings import ADAPTERS, REWORDINGS, Rewording, reworded
from models.sentences import is_right, kind_of, read_sentences, strays_of
from models.splits import Prompt, held_out, held_out_with_tools

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
    if any(prompt.tools for prompt in prompts):
        raise SystemExit("prompts with tools need --folder")
    from hearth_client import Client  # noqa: PLC0415 - one of two ways to get answers

    def answer(messages: list[Message]) -> str:
        with Client() as client:
            generation = client.generate(
                messages=messages, max_tokens=MAX_TOKENS, temperature=0, adapter=adapter
            )
            return generation.text()

    return ask_all(prompts, answer, threads)


def _in_process(prompts: Sequence[Prompt], folder: Path, adapter: Path | None) -> list[str]:
    from models.folder import answers  # noqa: PLC0415 - it needs torch

    with tempfile.TemporaryDirectory() as scratch:
        if adapter:
            write_merged(folder, adapter, Path(scratch) / "merged")
            folder = Path(scratch) / "merged"
        chats = [(prompt.messages, prompt.tools) for prompt in prompts]
        return answers(folder, chats, MAX_TOKENS)


def _sit(flags: argparse.Namespace) -> None:
    """Print how many sentences of a file are answered right, by kind, and what was not listed."""
    sentences = read_sentences(flags.exam)[:: flags.every]
    prompts = [
        Prompt(kind_of(one), one.messages, json.dumps(one.expect), one.tools) for one in sentences
    ]
    if flags.folder:
        answers = _in_process(prompts, flags.folder, None)
    else:
        answers = _through_daemon(prompts, flags.threads, "")
    asked = list(zip(prompts, answers, sentences, strict=True))
    rights = [is_right(answer, one.expect, one.devices) for _, answer, one in asked]
    if flags.wrong:
        missed = [pair[:2] for pair, right in zip(asked, rights, strict=True) if not right]
        print(wrong(*zip(*missed, strict=True)) if missed else "none is wrong")
    pairs = zip(prompts, rights, strict=True)
    print(report(score(prompts, [one.expected if right else "" for one, right in pairs])))
    strays = [name for _, answer, one in asked for name in strays_of(answer, one)]
    print(f"acted on what is not listed: {len(strays)}", *strays, sep="\n  ")


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="load this folder instead of asking the daemon")
    parser.add_argument("--exam", type=Path, help="sentences of a JSONL file: models/sentences.py")
    parser.add_argument("--tools", action="store_true", help="ask prompts with tools, by --folder")
    parser.add_argument("--adapters", type=Path, default=ADAPTERS, help="the adapters' folder")
    parser.add_argument("--adapter", choices=list(REWORDINGS), default="")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--every", type=int, help="ask only every so-many-th prompt", default=1)
    parser.add_argument("--wrong", action="store_true", help="print the wrong answers")
    flags = parser.parse_args()
    if flags.tools and not flags.folder:
        parser.error("--tools needs --folder")
    return flags


def main() -> None:
    """Print the scores, and the wrong answers if asked for."""
    flags = _flags()
    if flags.exam:
        _sit(flags)
        return
    prompts = (held_out_with_tools() if flags.tools else held_out())[:: flags.every]
    if flags.adapter:
        prompts = [reworded_prompt(one, REWORDINGS[flags.adapter]) for one in prompts]
    if flags.folder:
        adapter = flags.adapters / flags.adapter if flags.adapter else None
        answers = _in_process(prompts, flags.folder, adapter)
    else:
        answers = _through_daemon(prompts, flags.threads, flags.adapter)
    if flags.wrong:
        print(wrong(prompts, answers))
    print(report(score(prompts, answers)))


if __name__ == "__main__":
    main()
