from typing import Any

import pytest

from hearth.runtime.config import RopeConfig
from hearth.runtime.errors import HearthError
from hearth.runtime.export.json_file import Fields
from hearth.runtime.export.model_config import read_rope

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(**fields: Any) -> RopeConfig:
    return read_rope(Fields(fields, "config.json"), 64)


def fault(**fields: Any) -> tuple[str, str | None]:
    with pytest.raises(HearthError) as caught:
        read(**fields)
    return caught.value.code, caught.value.field


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"rope_type": "default"}, RopeConfig(theta=1e6)),
        ({"rope_type": "linear", "factor": 4.0}, RopeConfig(type="linear", theta=1e6, factor=4.0)),
        (
            {"rope_type": "llama3", **LLAMA3},
            RopeConfig(
                type="llama3",
                theta=1e6,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=8192,
            ),
        ),
    ],
    ids=["default", "linear", "llama3"],
)
def test_both_spellings_say_the_same(scaling: dict[str, Any], expected: RopeConfig) -> None:
    assert read(rope_theta=1e6, rope_scaling=scaling) == expected
    assert read(rope_parameters={"rope_theta": 1e6, **scaling}) == expected


def test_the_oldest_spelling_of_the_type() -> None:
    assert read(rope_scaling={"type": "linear", "factor": 2.0}).factor == 2.0


@pytest.mark.parametrize("fields", [{}, {"rope_scaling": None}])
def test_nothing_stated_means_plain_rotation(fields: dict[str, Any]) -> None:
    assert read(**fields) == RopeConfig(theta=10_000.0)


def test_a_theta_beside_rope_parameters_counts_when_they_have_none() -> None:
    assert read(rope_theta=5e5, rope_parameters={"rope_type": "default"}).theta == 5e5


@pytest.mark.parametrize(
    ("factor", "code"),
    [(0.5, "model_unsupported"), (1e308, "model_unsupported"), (0, "model_invalid")],
)
def test_a_part_of_the_head_is_not_rotated(factor: float, code: str) -> None:
    partial = {"partial_rotary_factor": factor}
    assert fault(**partial) == (code, "partial_rotary_factor")
    for place in ("rope_parameters", "rope_scaling"):
        scaling = {"rope_type": "default", **partial}
        assert fault(**{place: scaling}) == (code, "partial_rotary_factor")
        # The field beside it is read where it says otherwise.
        beside = {place: {"rope_type": "default", "partial_rotary_factor": 1.0}}
        assert fault(**beside, **partial) == (code, "partial_rotary_factor")


def test_whole_heads_may_be_stated() -> None:
    assert read(partial_rotary_factor=1, rope_scaling=None) == RopeConfig()


@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope", "mrope", "su"])
def test_an_unserved_kind_is_refused(kind: str) -> None:
    expected = ("model_unsupported", "rope_type")
    assert fault(rope_scaling={"type": kind, "factor": 2.0}) == expected
    assert fault(rope_parameters={"rope_type": kind, "factor": 2.0}) == expected


def test_an_unserved_parameter_is_refused_by_name() -> None:
    scaling = {"rope_type": "default", "mrope_section": [16, 24, 24]}
    assert fault(rope_scaling=scaling) == ("model_unsupported", "mrope_section")


@pytest.mark.parametrize("name", list(LLAMA3))
def test_a_missing_parameter_is_named(name: str) -> None:
    scaling = {key: value for key, value in LLAMA3.items() if key != name}
    assert fault(rope_scaling={"rope_type": "llama3", **scaling}) == ("model_invalid", name)


def test_limits_of_llama3_must_be_in_order() -> None:
    scaling = {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}
    assert fault(rope_scaling=scaling) == ("model_invalid", "high_freq_factor")
