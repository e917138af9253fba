import pytest
from msgspec import structs

from hearth.runtime.config import DRAFT_ARCHITECTURE
from hearth.runtime.tensors.dims import InferenceDims
from hearth.runtime.tensors.profiles import build_profiles, generation_profile, static_dims
from tests.runtime.engine_configs import small_config

SIZES = (1, 2, 4)
PLAN = structs.replace(
    small_config(), backend="tensorrt", device="cuda", static_decode_batches=SIZES
)
BASE = structs.replace(
    PLAN,
    enable_eagle_spec_decode=True,
    eagle_layers=(0, 1, 2),
    output_hidden_dim=48,
    max_verify_tree_size=9,
)
DRAFT = structs.replace(
    PLAN,
    architecture=DRAFT_ARCHITECTURE,
    num_decoder_layers=1,
    base_hidden_dim=48,
    max_draft_tree_size=6,
    static_drafting=(2, 3),
)


def test_a_plain_engine_decodes() -> None:
    assert static_dims(PLAN) == tuple(InferenceDims.decode(size, 64) for size in SIZES)


@pytest.mark.parametrize("batch", SIZES)
def test_a_base_decodes_and_verifies(batch: int) -> None:
    profiles = build_profiles(BASE)
    assert len(profiles) == 7
    decode, verify = InferenceDims.decode(batch, 64), InferenceDims.spec_verify(batch, 9, 64)
    assert set(profiles[generation_profile(BASE, batch)]) == {decode}
    assert set(profiles[generation_profile(BASE, batch, second=True)]) == {verify}


@pytest.mark.parametrize("batch", SIZES)
def test_a_draft_proposes_and_takes_a_rounds_tokens(batch: int) -> None:
    profiles = build_profiles(DRAFT)
    assert len(profiles) == 7
    proposal, accept = InferenceDims.proposal(batch, 6, 2, 64), InferenceDims.accept(batch, 4, 64)
    assert set(profiles[generation_profile(DRAFT, batch)]) == {proposal}
    assert set(profiles[generation_profile(DRAFT, batch, second=True)]) == {accept}


def test_without_static_sizes_one_profile_serves_all() -> None:
    dynamic = structs.replace(DRAFT, static_decode_batches=(), static_drafting=())
    assert len(build_profiles(dynamic)) == 2
    assert generation_profile(dynamic, 2) == generation_profile(dynamic, 3, second=True) == 1
