from typing import Any

import pytest
from msgspec import structs

from hearth.runtime.config import FileRecord
from hearth.runtime.kv_cache.prefix_cache import engine_digest, is_exact
from tests.runtime.engine_configs import small_config

CONFIG = structs.replace(small_config(), dialect="native", device="cpu")


@pytest.mark.parametrize(
    ("changed", "exact"),
    [
        ({}, True),
        ({"weight_quantization": "int4"}, True),
        ({"weight_quantization": "int4", "head_quantization": "int8"}, False),
        ({"weight_quantization": "int8"}, False),
        ({"dialect": "classic"}, False),
        ({"dtype": "float16"}, False),
        ({"device": "cuda"}, False),
        ({"device": "cuda", "backend": "kernels", "dtype": "bfloat16"}, True),
    ],
)
def test_bits_are_the_same_where_that_was_measured(changed: dict[str, Any], exact: bool) -> None:  # noqa: FBT001 - of a table
    assert is_exact(structs.replace(CONFIG, **changed), ("avx512_vnni",)) == exact


def test_products_of_four_bits_are_exact_with_the_instructions_that_were_measured_alone() -> None:
    assert is_exact(CONFIG, ("avx2",))
    assert not is_exact(structs.replace(CONFIG, weight_quantization="int4"), ("avx2",))


def test_what_computes_other_numbers_has_another_digest() -> None:
    weights = {"model.onnx.data": FileRecord(1, "aa")}
    engines = [
        [CONFIG],
        [structs.replace(CONFIG, files=weights)],
        [structs.replace(CONFIG, files={"model.onnx.data": FileRecord(1, "bb")})],
        [structs.replace(CONFIG, dialect="classic")],
        [structs.replace(CONFIG, device="cuda")],
        [CONFIG, CONFIG],
    ]
    assert len({engine_digest(one) for one in engines}) == len(engines)
    # Limits are the caller's: what lies on disk serves with others too.
    fewer = structs.replace(CONFIG, max_supported_batch_size=1, max_kv_cache_capacity=8)
    assert engine_digest([fewer]) == engine_digest([CONFIG])
