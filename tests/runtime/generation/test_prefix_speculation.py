"""Speculation behind a prefix that was there: the same rounds, the same text."""

from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from hearth.runtime.generation.runtime import LLMInferenceRuntime
from hearth.runtime.options import EagleDraftingConfig, SpeculationOptions
from hearth.runtime.request import RowRequest
from hearth.runtime.speculation.eagle import EagleProposer
from tests.runtime.conftest import EngineFolders
from tests.runtime.generation.prefix_rows import (
    Outcome,
    check_equal,
    computed,
    needs_native,
    open_pages,
    prompt,
    row,
    run,
)

SHARED = prompt(70, 3)
CHAIN = EagleDraftingConfig(drafting_top_k=1, drafting_step=4, verify_tree_size=5)
TREE = EagleDraftingConfig(drafting_top_k=3, drafting_step=3, verify_tree_size=9)


def speculating(
    folder: Path, tree: EagleDraftingConfig | None, pages: int = 60
) -> LLMInferenceRuntime:
    """By a draft with these trees, else by lookup."""
    method: Literal["lookup", "eagle"] = "lookup" if tree is None else "eagle"
    chosen = SpeculationOptions(method=method, adaptive=False, eagle=tree)
    return open_pages(folder, pages, speculation=chosen)


def check_same(found: Outcome, wanted: Outcome, *, exact: bool = True) -> None:
    """Text and rounds of the first row."""
    check_equal(found.tokens[0], wanted.tokens[0], exact=exact)
    assert found.rounds == wanted.rounds
    assert found.rounds


@pytest.mark.parametrize("tree", [None, CHAIN, TREE])
def test_rounds_behind_a_prefix_are_those_without(
    tree_folders: EngineFolders, dialect: str, tree: EagleDraftingConfig | None
) -> None:
    # Rows that say one token again and again are what a lookup continues.
    options: dict[str, Any] = {} if tree else {"logit_bias": ((9, 100.0),)}
    asked = [*SHARED, 9, 9, 9, 9, 9]
    exact = dialect == "native" and tree is not TREE
    with closing(speculating(tree_folders("qwen3", dialect), tree)) as runtime:
        run(runtime, row(SHARED))
        computed(runtime)
        found = run(runtime, row(asked, **options))
        # With the draft one token more: its next entry wants the hidden state of that.
        assert found.cached == {0: 70 - (tree is not None)}
        assert computed(runtime) == 5 + (tree is not None)
        wanted = run(runtime, row(asked, cache="bypass", **options))
        check_same(found, wanted, exact=exact)
        whole = run(runtime, row(asked, **options))
        assert whole.cached == {0: 74}
        check_same(whole, found, exact=exact)


def drafts_of(runtime: LLMInferenceRuntime, request: RowRequest) -> list[np.ndarray]:
    """The draft's entries of a row's prompt, once it decodes."""
    assert runtime._speculation is not None
    proposer = runtime._speculation.proposer
    assert isinstance(proposer, EagleProposer)
    (number,) = runtime.admit([request])
    while not runtime.step().tokens:
        pass
    caches = proposer._draft.caches
    entries = caches.capture(0, caches.row_lengths[0]).attention
    runtime.leave(number)
    return entries


def test_the_drafts_entries_come_with_the_pages(tree_folders: EngineFolders, dialect: str) -> None:
    with closing(speculating(tree_folders("qwen3", dialect), CHAIN)) as runtime:
        asked = row([*SHARED, 4, 5, 6])
        wanted = drafts_of(runtime, row(asked.token_ids, cache="bypass"))
        run(runtime, row(SHARED))
        found = drafts_of(runtime, asked)
        assert [one.shape for one in found] == [one.shape for one in wanted]
        for one, other in zip(found, wanted, strict=True):
            assert one.shape[1] == len(asked.token_ids) - 1
            np.testing.assert_allclose(one, other, rtol=0, atol=2e-5)


@needs_native
def test_a_reply_of_vanilla_steps_has_no_entries_and_is_reused_for_the_base(
    tree_folders: EngineFolders,
) -> None:
    with closing(speculating(tree_folders("qwen3", "native"), CHAIN)) as runtime:
        reply = run(runtime, row(SHARED, speculation=False)).reply()
        text = SHARED + reply
        computed(runtime)
        second = run(runtime, row([*text, 5]))
        # Of 80 tokens 79 were computed before; those of the prompt have entries, the reply none.
        assert second.cached == {0: 79}
        wanted = run(runtime, row([*text, 5], cache="bypass"))
        check_equal(second.tokens[0], wanted.tokens[0], exact=True)
        # Its end has no entries, so nothing behind it is kept as if it had.
        third = run(runtime, row([*text, 5], speculation=True))
        assert third.cached == {0: 80}
        check_equal(third.tokens[0], wanted.tokens[0], exact=True)


@needs_native
def test_a_reply_of_rounds_is_kept_with_its_entries(tree_folders: EngineFolders) -> None:
    with closing(speculating(tree_folders("qwen3", "native"), CHAIN)) as runtime:
        reply = run(runtime, row(SHARED)).reply()
        asked = [*SHARED, *reply, 5, 6, 7]
        found = run(runtime, row(asked))
        assert found.cached[0] >= len(SHARED)
        check_same(found, run(runtime, row(asked, cache="bypass")))


@needs_native
def test_what_a_branching_tree_has_put_elsewhere_is_not_kept_where_bits_count(
    tree_folders: EngineFolders,
) -> None:
    with closing(speculating(tree_folders("qwen3", "native"), TREE)) as runtime:
        asked = row(SHARED, max_tokens=40)
        reply = run(runtime, asked).reply()
        prefix = runtime._prefix
        assert prefix is not None
        text = SHARED + reply
        found = run(runtime, row(text, max_tokens=4))
        wanted = run(runtime, row(text, max_tokens=4, cache="bypass"))
        assert len(SHARED) <= found.cached[0] < len(text) - 1
        assert found.tokens[0][0].top == wanted.tokens[0][0].top
