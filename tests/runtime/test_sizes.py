from msgspec import structs

from runtime.sizes import kv_cache_bytes, rope_bytes, step_buffer_bytes
from tests.runtime.engine_configs import small_config


def test_caches_and_tables_grow_with_their_slots() -> None:
    config = small_config()
    assert kv_cache_bytes(config, 1, 1) == 2 * 2 * 1 * 8 * 4
    assert kv_cache_bytes(config, 3, 16) == 48 * kv_cache_bytes(config, 1, 1)
    assert rope_bytes(config, 64) == 2 * 64 * 4 * 4


def test_step_buffers_are_embeddings_logits_positions_and_new_rows() -> None:
    native = small_config()
    classic = structs.replace(native, dialect="classic")
    tokens = 2 * 16
    assert step_buffer_bytes(native, 2) == tokens * 16 * 4 + 2 * 100 * 4 + tokens * 8
    rows = tokens * 2 * 2 * 1 * 8 * 4
    assert step_buffer_bytes(classic, 2) == step_buffer_bytes(native, 2) + rows
