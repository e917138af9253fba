from typing import Any

import pytest

from tests.runtime.text.folders import CHATML
from tools.templates import MARKED, PLAIN, cases, compare

NAMES = {
    "messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token",
}  # fmt: skip


def chatml(**given: Any) -> str:
    assert given.keys() - {"enable_thinking"} == NAMES
    turns = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in given["messages"]]
    return "".join(turns) + "<|im_start|>assistant\n"


def refusing(**given: Any) -> str:
    raise ValueError(given)


@pytest.mark.parametrize("text", [PLAIN, MARKED])
def test_each_case_is_compared(text: str) -> None:
    names = [*cases(text)]
    assert [*compare(CHATML, chatml, text)] == [(name, "equal") for name in names]
    assert {result for _, result in compare(CHATML + ".", chatml, text)} == {"differs"}
    assert {result for _, result in compare(CHATML, refusing, text)} == {"refused by one"}
    refused = compare("{{ raise_exception('no') }}", refusing, text)
    assert {result for _, result in refused} == {"refused"}
