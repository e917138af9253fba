from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from models.draft_loss import Unrolled  # noqa: E402 - needs torch
from models.draft_model import Draft, DraftShape, rotate  # noqa: E402 - likewise

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
