from typing import Any

import pytest

from runtime.config import RopeConfig
from runtime.errors import HearthError
from runtime.export.json_file import Fields
from runtime.export.rope_config import read_rope

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(**fields: Any) -> tuple[RopeConfig, int]:
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
    assert read(rope_theta=1e6, rope_scaling=scaling) == (expected, 64)
    assert read(rope_parameters={"rope_theta": 1e6, **scaling}) == (expected, 64)


def test_the_oldest_spelling_of_the_type() -> None:
    assert read(rope_scaling={"type": "linear", "factor": 2.0})[0].factor == 2.0


@pytest.mark.parametrize("fields", [{}, {"rope_scaling": None}])
def test_nothing_stated_means_plain_rotation(fields: dict[str, Any]) -> None:
    assert read(**fields) == (RopeConfig(theta=10_000.0), 64)


def test_a_theta_beside_rope_parameters_counts_when_they_have_none() -> None:
    assert read(rope_theta=5e5, rope_parameters={"rope_type": "default"})[0].theta == 5e5


@pytest.mark.parametrize(
    "fields",
    [
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    ],
)
def test_a_part_of_the_head_is_rotated(fields: dict[str, Any]) -> None:
    assert read(**fields)[1] == 32


@pytest.mark.parametrize("factor", [0.01, 0.05, 1.5, 1e308])
def test_a_part_that_cannot_be_rotated_is_refused(factor: float) -> None:
    assert fault(partial_rotary_factor=factor) == ("model_invalid", "partial_rotary_factor")


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
