import msgspec
import pytest

from hearth.runtime.images import EmbeddedImage, ImageSpan, Slot
from hearth.runtime.kv_cache.pages import (
    PAGE_TOKENS,
    TokenIdentities,
    page_name,
    root_name,
    shared_tokens,
)

ROOT = root_name(b"engine", b"")
IMAGE = EmbeddedImage(Slot(0, 64, 1), 6, (ImageSpan(2, 6, 0, (1, 2, 3)),), b"a picture")


def shared(one: TokenIdentities, other: TokenIdentities) -> int:
    return shared_tokens(one.between(0, len(one)), other.between(0, len(other)))


def of(images: list[EmbeddedImage], ids: list[int] | None = None) -> TokenIdentities:
    return TokenIdentities(ROOT, ids or list(range(10)), images)


def test_tokens_are_the_same_by_their_ids() -> None:
    assert shared(of([]), of([])) == 10
    assert shared(of([]), of([], [0, 1, 2, 4, 4])) == 3
    assert shared(of([]), of([], [0, 1, 2])) == 3
    assert shared(of([]), of([], [1])) == 0


def test_an_images_tokens_are_known_by_the_image_whatever_their_ids() -> None:
    assert shared(of([IMAGE]), of([IMAGE], [0, 1, *[9] * 6, 8, 9])) == 10
    elsewhere = msgspec.structs.replace(IMAGE, slot=Slot(128, 64, 7))
    assert shared(of([IMAGE]), of([elsewhere])) == 10
    assert shared(of([IMAGE]), of([])) == 2


@pytest.mark.parametrize(
    "other",
    [
        {"key": b"another picture"},
        {"spans": (ImageSpan(2, 6, 0, (1, 3, 2)),)},
        {"spans": (ImageSpan(2, 6, 6, (1, 2, 3)),)},
        {"spans": (ImageSpan(2, 6, 0, (1, 2, 3), 2.0),)},
    ],
)
def test_an_image_is_another_by_its_key_its_grid_and_what_of_it_is_shown(
    other: dict[str, object],
) -> None:
    assert shared(of([IMAGE]), of([msgspec.structs.replace(IMAGE, **other)])) == 2


def test_an_image_that_goes_on_longer_is_the_same_as_far_as_both_go() -> None:
    cut = TokenIdentities(ROOT, list(range(5)), [IMAGE])
    assert (len(cut), shared(of([IMAGE]), cut)) == (5, 5)


def test_what_is_behind_an_image_without_a_key_has_no_identity() -> None:
    unknown = msgspec.structs.replace(IMAGE, key=b"")
    assert len(of([unknown])) == 2
    assert len(of([IMAGE, msgspec.structs.replace(unknown, spans=(ImageSpan(9, 1),))])) == 9


def test_pages_are_named_by_their_tokens_and_all_before() -> None:
    ids = list(range(3 * PAGE_TOKENS))
    first, second, third = TokenIdentities(ROOT, ids).page_names(len(ids))
    tokens = TokenIdentities(ROOT, ids)
    assert second == page_name(first, tokens.between(PAGE_TOKENS, 2 * PAGE_TOKENS))
    assert tokens.page_names(len(ids) - 1) == [first, second]
    other = TokenIdentities(ROOT, [7, *ids[1:]]).page_names(len(ids))
    elsewhere = TokenIdentities(root_name(b"engine", b"adapter"), ids).page_names(len(ids))
    assert len({first, second, third, *other, *elsewhere}) == 9


def test_a_root_is_of_one_engine_one_adapter_and_one_salt() -> None:
    parts = [(b"ab", b""), (b"a", b"b"), (b"", b"ab")]
    assert len({root_name(*both, salt) for both in parts for salt in ("", "a", "b")}) == 9


def test_no_salt_makes_a_root_of_a_page_s_name() -> None:
    tokens = TokenIdentities(ROOT, [7] * PAGE_TOKENS)
    salt = tokens.between(0, PAGE_TOKENS).decode()
    engine_and_adapter = (b"engine", b"")
    root = root_name(*engine_and_adapter)
    assert root_name(*engine_and_adapter, salt) != page_name(root, salt.encode())
