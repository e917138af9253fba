from models.evaluate_vision import blanked, wrong
from models.vision.prompts import held_out_prompts


def test_a_blank_picture_has_the_size_of_the_one_it_stands_for() -> None:
    prompts = held_out_prompts(1)
    for prompt, blank in zip(prompts, blanked(prompts), strict=True):
        assert blank.pixels.shape == prompt.pixels.shape
        assert blank.pixels.std() == 0 < prompt.pixels.std()
        assert blank[:3] == prompt[:3]


def test_wrong_shows_only_what_was_wrong() -> None:
    prompts = held_out_prompts(1)
    answers = ["nope", *(p.expected for p in prompts[1:])]
    assert wrong(prompts, answers).splitlines() == [
        f"{prompts[0].group}: {prompts[0].text}",
        f"  wanted {prompts[0].expected}",
        "  got    nope",
    ]
