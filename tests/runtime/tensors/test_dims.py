from hearth.runtime.tensors.dims import InferenceDims


def _sizes(dims: InferenceDims) -> tuple[int, ...]:
    return tuple(dims)


def test_the_five_recipes() -> None:
    # batch, seq, kv, select, mask columns, start indices
    assert _sizes(InferenceDims.prefill(3, 40, 256)) == (3, 40, 256, 1, 40, 3)
    assert _sizes(InferenceDims.decode(3, 256)) == (3, 1, 256, 1, 1, 3)
    assert _sizes(InferenceDims.spec_verify(2, 60, 512)) == (2, 60, 512, 60, 60, 2)
    assert _sizes(InferenceDims.proposal(2, 33, 10, 512)) == (2, 33, 512, 10, 33, 2)
    assert _sizes(InferenceDims.accept(2, 7, 512)) == (2, 7, 512, 1, 7, 2)


def test_equal_steps_are_equal_keys() -> None:
    assert len({InferenceDims.decode(1, 256), InferenceDims.prefill(1, 1, 256)}) == 1
