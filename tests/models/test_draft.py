import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hearth.runtime.export.draft_config import load_draft_config  # noqa: E402 - behind the skip above
from hearth.runtime.export.model_config import load_model_config  # noqa: E402 - behind the skip above
from models.draft import (  # noqa: E402 - behind the skip above
    DECAY,
    TAPS,
    Anchors,
    Base,
    Draft,
    DraftShape,
    Unrolled,
    anchors_of,
    at,
    config_of,
    losses_of,
    read_draft,
    rotate,
    write_draft,
)
from models.evaluate_draft import (  # noqa: E402 - behind the skip above
    SHAPES,
    Tally,
    TreeShape,
    accept_lengths,
    accepted,
    first_guess,
    greedy,
    report,
    tally,
)
from models.splits import held_out  # noqa: E402 - behind the skip above
from models.train_draft import new_draft  # noqa: E402 - behind the skip above

SHAPE = DraftShape(hidden=16, heads=4, kv_heads=2, head_dim=8, intermediate=24, vocabulary=32)


def _draft() -> Draft:
    torch.manual_seed(0)
    draft = Draft(SHAPE)
    for parameter in draft.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return draft


def _plain(draft: Draft, embedding: Any, x: Any) -> Any:
    """Return the last output of a whole sequence [S, H], by causal attention head by head."""
    layer, size = draft.midlayer, len(x)
    inputs = torch.cat((layer.input_layernorm(embedding), layer.hidden_norm(x)), -1)
    place = torch.arange(size)[None]
    attention = layer.self_attn
    q = rotate(attention.q_proj(inputs).view(1, size, 4, 8), place, SHAPE.theta)[0]
    k = rotate(attention.k_proj(inputs).view(1, size, 2, 8), place, SHAPE.theta)[0]
    v = attention.v_proj(inputs).view(size, 2, 8)
    heads = []
    for head in range(4):
        weights = (k[:, head // 2] @ q[-1, head] / 8**0.5).softmax(0)
        heads.append(weights @ v[:, head // 2])
    out = x[-1] + attention.o_proj(torch.cat(heads))
    return out + layer.mlp(layer.post_attention_layernorm(out))


def test_the_parameters_have_their_published_names_and_shapes() -> None:
    shapes = {name: tuple(value.shape) for name, value in Draft(SHAPE).state_dict().items()}
    assert shapes == {
        "fc.weight": (16, 48),
        "midlayer.self_attn.q_proj.weight": (32, 32),
        "midlayer.self_attn.k_proj.weight": (16, 32),
        "midlayer.self_attn.v_proj.weight": (16, 32),
        "midlayer.self_attn.o_proj.weight": (16, 32),
        "midlayer.mlp.gate_proj.weight": (24, 16),
        "midlayer.mlp.up_proj.weight": (24, 16),
        "midlayer.mlp.down_proj.weight": (16, 24),
        "midlayer.hidden_norm.weight": (16,),
        "midlayer.input_layernorm.weight": (16,),
        "midlayer.post_attention_layernorm.weight": (16,),
        "norm.weight": (16,),
        "lm_head.weight": (32, 16),
    }


def test_a_turn_by_no_position_is_none_and_halves_are_paired() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)
    assert rotate(x, torch.tensor([[0]]), 10000.0).equal(x)
    turned = rotate(x, torch.tensor([[2]]), 10000.0)[0, 0, 0]
    two = torch.tensor(2.0)
    assert turned[0].item() == pytest.approx((1 * two.cos() - 3 * two.sin()).item())
    assert turned[2].item() == pytest.approx((3 * two.cos() + 1 * two.sin()).item())


def test_every_step_equals_attention_over_base_fed_entries_and_then_draft_fed_ones() -> None:
    draft, table = _draft(), torch.randn(32, 16)
    ids, taps = torch.randint(0, 32, (2, 9)), torch.randn(2, 9, 48)
    unrolled = Unrolled(draft, table, ids, taps)
    entry = torch.tensor([[2, 4], [3, 0]])
    outputs, chain = [unrolled.first(entry)], None
    for depth in (1, 2, 3):
        tokens = ids.gather(1, entry + 1 + depth)
        hidden, chain = unrolled.further(tokens, outputs[-1], entry, chain)
        outputs.append(hidden)
    for row in range(2):
        for column in range(2):
            anchor = int(entry[row, column])
            for depth, output in enumerate(outputs):
                fed = [taps[row, : anchor + 1] @ draft.fc.weight.T]
                fed += [outputs[d][row, column][None] for d in range(depth)]
                embedding = table[ids[row, 1 : anchor + depth + 2]]
                wanted = _plain(draft, embedding, torch.cat(fed))
                assert output[row, column].allclose(wanted, atol=1e-5)


def _unrolled() -> Unrolled:
    torch.manual_seed(1)
    ids, taps = torch.randint(0, 32, (1, 10)), torch.randn(1, 10, 48)
    return Unrolled(Draft(SHAPE), torch.randn(32, 16), ids, taps)


def test_anchors_are_the_entries_of_answers_with_a_token_left() -> None:
    answers = torch.zeros((2, 9), dtype=torch.bool)
    answers[0, 2:5] = answers[0, 6:9] = True  # two answers
    answers[1, 4:6] = True
    found = anchors_of(answers)
    assert found.entry.tolist() == [[1, 2, 5, 6], [3, 0, 1, 2]]
    assert found.room.tolist() == [[2, 1, 2, 1], [1, 0, 0, 0]]


def test_no_answer_leaves_one_anchor_without_room() -> None:
    assert anchors_of(torch.zeros((1, 5), dtype=torch.bool)).room.tolist() == [[0]]


def test_at_takes_rows_of_any_shape() -> None:
    values = torch.arange(24).view(2, 3, 4)
    assert at(values, torch.tensor([[2], [0]])).tolist() == [[[8, 9, 10, 11]], [[12, 13, 14, 15]]]
    assert at(values[..., 0], torch.tensor([[1], [1]])).tolist() == [[4], [16]]


def test_the_loss_is_the_decayed_cross_entropy_of_the_steps_with_room() -> None:
    unrolled, teacher = _unrolled(), torch.randn(1, 10, 32)
    anchors = Anchors(torch.tensor([[2, 4]]), torch.tensor([[2, 1]]))
    losses = losses_of(unrolled, teacher, anchors, steps=3)
    first = unrolled.first(anchors.entry)
    second, _ = unrolled.further(unrolled.ids[:, [4, 6]], first, anchors.entry, None)
    cross = torch.nn.functional.cross_entropy
    one = cross(unrolled.draft.logits(first)[0], teacher[0, [3, 5]].softmax(-1))
    two = cross(unrolled.draft.logits(second)[0, :1], teacher[0, [4]].softmax(-1))
    assert losses.loss.item() == pytest.approx((one + DECAY * two).item(), rel=1e-5)
    assert losses.total.tolist() == [2, 1, 0]


def test_a_teacher_that_is_the_draft_is_always_right() -> None:
    unrolled = _unrolled()
    anchors = Anchors(torch.tensor([[2]]), torch.tensor([[1]]))
    teacher = torch.zeros(1, 10, 32)
    teacher[0, 3] = unrolled.draft.logits(unrolled.first(anchors.entry))[0, 0].detach()
    assert losses_of(unrolled, teacher, anchors, 1).right.tolist() == [1]
    assert losses_of(unrolled, -teacher, anchors, 1).right.tolist() == [0]


def test_training_on_one_batch_lowers_the_loss() -> None:
    torch.manual_seed(2)
    draft, table = Draft(SHAPE), torch.randn(32, 16)
    ids, taps, teacher = torch.randint(0, 32, (2, 8)), torch.randn(2, 8, 48), torch.randn(2, 8, 32)
    anchors = anchors_of(torch.ones((2, 8), dtype=torch.bool))
    optimizer, seen = torch.optim.Adam(draft.parameters(), 1e-2), []
    for _ in range(20):
        loss = losses_of(Unrolled(draft, table, ids, taps), 5 * teacher, anchors, 3).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    assert seen[-1] < 0.5 * seen[0]


TREE_SHAPE = DraftShape(hidden=16, heads=4, kv_heads=2, head_dim=8, intermediate=24, vocabulary=6)
Node = tuple[tuple[int, ...], float, Any, Any]  # path, score, output and chain


def _unrolled_for_trees(seed: int) -> Unrolled:
    torch.manual_seed(seed)
    ids, taps = torch.randint(0, 6, (2, 12)), torch.randn(2, 12, 48)
    return Unrolled(Draft(TREE_SHAPE), torch.randn(6, 16), ids, taps)


def _best(unrolled: Unrolled, hidden: Any, row: int, top_k: int) -> list[tuple[int, float]]:
    scores = unrolled.draft.logits(hidden)[row, 0].log_softmax(-1)
    return [(int(t), float(scores[t])) for t in scores.argsort(descending=True)[:top_k]]


def _plain_tree(unrolled: Unrolled, row: int, anchor: int, shape: TreeShape) -> int:
    """Return the accepted length of one tree, built node by node as (path, score)."""
    entry = torch.full((2, 1), anchor)
    hidden = unrolled.first(entry)
    level: list[Node] = [
        ((t,), s, hidden, None) for t, s in _best(unrolled, hidden, row, shape.top_k)
    ]
    nodes = [node[:2] for node in level]
    for _ in range(shape.steps - 1):
        children: list[Node] = []
        for path, score, x, chain in level:
            token = torch.full((2, 1), path[-1])
            out, own = unrolled.further(token, x, entry, chain)
            for t, s in _best(unrolled, out, row, shape.top_k):
                children.append(((*path, t), score + s, out, own))
        nodes += [child[:2] for child in children]
        level = sorted(children, key=lambda c: -c[1])[: shape.top_k]
    kept = {path for path, _ in sorted(nodes, key=lambda n: -n[1])[: shape.size - 1]}
    text, length = tuple(unrolled.ids[row, anchor + 2 :].tolist()), 0
    while text[: length + 1] in kept:
        length += 1
    return length


@pytest.mark.parametrize(
    "shape", [TreeShape(1, 4, 5), TreeShape(3, 3, 10), TreeShape(4, 2, 5), TreeShape(5, 1, 6)]
)
def test_every_anchor_accepts_what_a_tree_built_node_by_node_accepts(shape: TreeShape) -> None:
    lengths = set()
    with torch.no_grad():
        for seed in range(3):
            unrolled = _unrolled_for_trees(seed)
            entry = torch.tensor([[0, 3, 5], [1, 2, 4]])
            found = accepted(unrolled, entry, shape)
            for row, anchors in enumerate(entry.tolist()):
                plain = [_plain_tree(unrolled, row, anchor, shape) for anchor in anchors]
                assert found[row].tolist() == plain
                lengths.update(plain)
    assert len(lengths) > 1


def test_a_tree_of_every_token_accepts_any_first_token() -> None:
    with torch.no_grad():
        found = accepted(_unrolled_for_trees(0), torch.tensor([[0, 1], [2, 3]]), TreeShape(6, 1, 7))
    assert found.tolist() == [[1, 1], [1, 1]]


HOME = Path(__file__).parents[2] / "models" / "home"


def test_a_draft_comes_back_as_it_was_written_in_bfloat16(tmp_path: Path) -> None:
    shape = DraftShape(hidden=16, heads=4, kv_heads=1, head_dim=8, intermediate=24, vocabulary=32)
    draft = Draft(shape)
    write_draft(tmp_path, draft)
    back = read_draft(tmp_path)
    assert back.shape == shape
    for name, value in draft.state_dict().items():
        assert back.state_dict()[name].equal(value.bfloat16().float()), name


def test_the_configuration_is_the_published_form_and_fits_the_base() -> None:
    config, base = config_of(DraftShape()), json.loads((HOME / "config.json").read_text("utf-8"))
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["target_layer_ids"] == [1, 5, 8]  # by their outputs
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 5, 8]
    assert config["draft_vocab_size"] == base["vocab_size"]
    shared = ("hidden_size", "head_dim", "rope_theta", "rms_norm_eps", "max_position_embeddings")
    assert {key: config[key] for key in shared} == {key: base[key] for key in shared}


def test_the_exporter_reads_the_taps_and_sizes_that_were_trained(tmp_path: Path) -> None:
    write_draft(tmp_path, Draft(DraftShape()))
    config = load_draft_config(tmp_path, load_model_config(HOME))
    assert config.taps == TAPS
    assert config.vocab_size == DraftShape().vocabulary
    assert (config.model.num_attention_heads, config.model.num_kv_heads) == (8, 4)


def test_the_taps_are_the_inputs_of_the_tapped_layers() -> None:
    base = Base(HOME, "cpu")
    ids = torch.randint(3, 1000, (2, 9))
    reading = base.read(ids)
    whole = base.model(input_ids=ids, output_hidden_states=True)
    assert TAPS == (2, 12 // 2, 12 - 3)
    wanted = torch.cat([whole.hidden_states[layer] for layer in TAPS], -1)
    assert reading.taps.allclose(wanted, atol=1e-5)
    assert reading.logits.allclose(whole.logits, atol=1e-4)


def test_a_new_draft_passes_the_highest_tap_to_the_bases_head() -> None:
    base = Base(HOME, "cpu")
    draft, taps = new_draft(base, DraftShape()), torch.randn(1, 3, 3 * 192)
    assert draft.fused(taps).allclose(taps[..., 2 * 192 :], atol=1e-6)
    assert draft.lm_head.weight.equal(base.embedding)
    assert all(parameter.requires_grad for parameter in draft.parameters())


@pytest.fixture(scope="module")
def base() -> Base:
    return Base(HOME, "cpu")


def test_a_round_emits_what_it_accepts_and_one_more_but_no_token_past_the_end() -> None:
    anchors = Anchors(torch.tensor([[4, 5, 6, 7, 8]]), torch.tensor([[5, 4, 3, 2, 1]]))
    lengths = torch.tensor([[1, 0, 0, 5, 0]])
    assert tally(anchors, lengths) == [Tally(5, 3)]  # 2 tokens, 1 token, 2 of 6 tokens
    assert tally(anchors, torch.zeros_like(lengths)) == [Tally(5, 5)]


def test_an_answer_of_one_token_needs_no_verification() -> None:
    assert tally(Anchors(torch.tensor([[4]]), torch.tensor([[0]])), torch.tensor([[3]])) == [
        Tally(0, 0)
    ]
    assert Tally().length == 0.0
    assert Tally(7, 2).length == 3.5


def test_greedy_answers_are_those_of_one_token_after_the_other(base: Base) -> None:
    torch.manual_seed(0)
    prompts = torch.randint(3, 1000, (2, 6))
    ids = torch.zeros((2, 14), dtype=torch.long)
    ids[:, :6] = prompts
    ids[1, 5] = 7
    lengths, end = torch.tensor([6, 5]), 2
    text = greedy(base, ids, lengths, end)
    for row, length in enumerate(lengths.tolist()):
        tokens = ids[row, :length].tolist()
        while len(tokens) < ids.shape[1] and (len(tokens) == length or tokens[-1] != end):
            tokens.append(int(base.read(torch.tensor([tokens])).logits[0, -1].argmax()))
        assert text.ids[row, : len(tokens)].tolist() == tokens
        assert text.answers[row].nonzero()[:, 0].tolist() == list(range(length, len(tokens)))


def test_the_first_guess_ends_with_the_expected_answer() -> None:
    tokenizer, prompts = Tokenizer.from_file(str(HOME / "tokenizer.json")), held_out()[:2]
    ids, lengths = first_guess(prompts, tokenizer)
    for row, prompt in enumerate(prompts):
        assert tokenizer.decode(ids[row, lengths[row] :].tolist()) == prompt.expected
        assert ids[row, lengths[row] - 1] != 0


def test_the_table_has_a_row_for_each_group_and_a_column_for_each_shape() -> None:
    lines = report({"lights": dict.fromkeys(SHAPES, Tally(6, 4))}).splitlines()
    assert "(10, 6, 60)" in lines[0]
    assert lines[2].split("|")[1:4] == [" lights ", " 6 ", " 1.50 "]
    assert TreeShape(1, 4, 5) in SHAPES


MODELS = Path(__file__).parents[2] / "models"


def test_the_shipped_draft_is_of_the_shape_that_is_trained() -> None:
    assert read_draft(MODELS / "home-draft").shape == DraftShape()


@pytest.mark.slow
def test_the_shipped_draft_has_three_tokens_accepted_in_a_round() -> None:
    base = Base(MODELS / "home", "cpu")
    draft = read_draft(MODELS / "home-draft")
    tokenizer = Tokenizer.from_file(str(MODELS / "home" / "tokenizer.json"))
    lengths = accept_lengths(draft, base, held_out()[::193], tokenizer)["all"]
    chain, tree = lengths[TreeShape(1, 4, 5)], lengths[TreeShape(4, 3, 16)]
    assert chain.emitted > 100
    assert 3.0 < chain.length <= 5.0
    assert 3.0 < tree.length <= 4.0
