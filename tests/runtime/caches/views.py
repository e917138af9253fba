from typing import Any

from numpy.typing import NDArray

from hearth.runtime.kv_cache.kv_cache_manager import KVCacheManager
from hearth.runtime.tensors.tensor import Tensor


def cache_view(cache: KVCacheManager, tensor: Tensor, rows: int) -> NDArray[Any]:
    """The first `rows` of a cache on the host as [rows, kv_heads, bucket, head_dim]."""
    _, heads, _, head_dim = tensor.shape
    return tensor.view((rows, heads, cache.bucket, head_dim))
