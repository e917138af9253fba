from models.conversations import Message
from models.evaluate import Score, ask_all, report, score, wrong
from models.splits import Prompt

PROMPTS = [
    Prompt("lights", [{"role": "user", "content": "one"}], "1"),
    Prompt("lights", [{"role": "user", "content": "two"}], "2"),
    Prompt("facts", [{"role": "user", "content": "three"}], "3"),
]


def _echo(messages: list[Message]) -> str:
    return {"one": "1", "two": "two", "three": " 3\n"}[messages[-1]["content"]]


def test_score_counts_exact_matches_by_group() -> None:
    scores = score(PROMPTS, ["1", "two", "3"])
    assert scores == {"facts": Score(1, 1), "lights": Score(1, 2), "all": Score(2, 3)}


def test_answers_come_in_the_order_of_the_prompts() -> None:
    answers = ask_all(PROMPTS, _echo, threads=3)
    assert answers == ["1", "two", " 3\n"]
    assert score(PROMPTS, answers)["all"] == Score(2, 3)


def test_report_has_a_line_for_each_group() -> None:
    assert report(score(PROMPTS, ["1", "2", "3"])).splitlines()[-1].split()[0] == "all"


def test_wrong_shows_only_what_was_wrong() -> None:
    assert wrong(PROMPTS, ["1", "nope", "3"]).splitlines()[0] == "lights: two"


def test_the_share_of_nothing_is_zero() -> None:
    assert Score(0, 0).share == 0.0
