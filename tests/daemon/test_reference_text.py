"""Greedy text through the daemon against transformers, on the model that ships."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hearth.daemon.own_daemon import own_daemon
from hearth.daemon.shipped_files import EXAMPLE_HOME
from hearth.runtime.export import ExportOptions, export_model
from hearth_client import Client

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

MODEL = Path(__file__).parents[2] / "models" / "home"
NEAR_TIE = 1e-4
QUESTIONS = (
    "hello",
    "turn on the desk lamp",
    "set the main thermostat to 21 degrees",
    "what is in the kitchen?",
    "list all devices",
    "good night",
    "is the front door locked?",
    "turn on the zephyr fan",
    "the spare key is in the blue box",
    "an utterly unexpected sentence, 1234567890 & ünïcödé",
)
CHATS = [
    [{"role": "system", "content": EXAMPLE_HOME}, {"role": "user", "content": question}]
    for question in QUESTIONS
]


class Reference(NamedTuple):
    """Greedy tokens, their text, and by how much each token's logit led the second."""

    tokens: list[int]
    text: str
    leads: list[float]


@pytest.fixture(scope="module")
def references() -> list[Reference]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    return [answer_of(tokenizer, model.eval(), turns) for turns in CHATS]


def answer_of(tokenizer: Any, model: Any, turns: list[dict[str, str]]) -> Reference:
    prompt = tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.inference_mode():
        out = model.generate(
            **prompt,
            max_new_tokens=80,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    tokens = out.sequences[0, prompt["input_ids"].shape[1] :].tolist()
    leads = [torch.topk(step[0], 2).values.diff().abs().item() for step in out.logits]
    return Reference(tokens, tokenizer.decode(tokens, skip_special_tokens=True), leads)


def differs(ours: list[int], reference: Reference) -> bool:
    """Whether the rows part anywhere but at a near-tie, where their comparison ends."""
    for mine, other, lead in zip(ours, reference.tokens, reference.leads, strict=False):
        if mine != other:
            return lead >= NEAR_TIE
    return len(ours) != len(reference.tokens)


@pytest.mark.reference
@pytest.mark.parametrize("dialect", ["native", "classic"])
def test_greedy_text_is_that_of_transformers(
    references: list[Reference], tmp_path: Path, dialect: Any
) -> None:
    engine = tmp_path / "home"
    export_model(MODEL, engine, ExportOptions(dialect=dialect, capacity=512))

    def ask(turns: list[dict[str, str]]) -> tuple[list[int], str]:
        with Client(daemon.socket) as client:
            generation = client.generate(messages=turns, max_tokens=80)
            text = generation.text()
            return generation.tokens, text

    with own_daemon(engine) as daemon, ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, CHATS))
    for question, (tokens, text), reference in zip(QUESTIONS, answers, references, strict=True):
        assert not differs(tokens, reference), question
        assert tokens != reference.tokens or text == reference.text
