from models.evaluate import Score
from models.vision.prompts import held_out_prompts, score, table
from models.vision.questions import GROUPS


def test_each_group_has_its_questions_and_a_seed_gives_one_set() -> None:
    first, second = held_out_prompts(3), held_out_prompts(3)
    assert [p.group for p in first] == [group for group in GROUPS for _ in range(3)]
    assert [p[:3] for p in first] == [p[:3] for p in second]
    assert all((a.pixels == b.pixels).all() for a, b in zip(first, second, strict=True))


def test_score_and_table_have_a_place_for_every_group() -> None:
    prompts = held_out_prompts(2)
    answers = [f" {p.expected}\n" if i else "no" for i, p in enumerate(prompts)]
    scores = score(prompts, answers)
    assert scores["all"] == Score(len(prompts) - 1, len(prompts))
    assert scores[GROUPS[0]] == Score(1, 2)
    head, line = table({"whole": scores}).splitlines()
    assert head.split() == [*GROUPS, "all"]
    assert line.split()[:3] == ["whole", "50.0", "100.0"]
