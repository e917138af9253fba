"""Rows about messages and requests that are wrong."""

from bench.faults.trial import Trial

PROMPT = "the lamp is on"


def same_bad_request_twice(trial: Trial) -> None:
    """A request that asks for no token comes twice."""
    with trial.talk(trial.shared()) as talk:
        refusals = []
        for _ in range(2):
            answer = talk.end(talk.generate(PROMPT, max_tokens=0)).answer
            refusals.append([answer.get("code"), answer.get("field")])
        trial.expect("refusals", refusals, [["invalid_value", "max_tokens"]] * 2)
        trial.expect("then", talk.word(talk.generate(PROMPT, max_tokens=4)), "length")
