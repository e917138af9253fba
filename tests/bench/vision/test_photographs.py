from hearth.bench.vision.photographs import SIZES, photograph, renamed
from hearth.runtime.image_processing.decoding import decode
from hearth.runtime.image_processing.headers import read_header


def test_a_photograph_is_a_file_of_its_size_and_the_same_each_time() -> None:
    size = SIZES[0]
    data = photograph(size)
    picture = read_header(memoryview(data))
    assert (picture.kind, picture.width, picture.height) == ("jpeg", *size)
    assert data == photograph(size)
    assert data != photograph(size, seed=1)


def test_a_renamed_one_has_the_same_pixels_in_other_bytes() -> None:
    data = photograph(SIZES[0])
    files = [data, renamed(data, 1), renamed(data, 2)]
    assert len(set(files)) == 3
    pixels = [decode(memoryview(one), read_header(memoryview(one))).tobytes() for one in files]
    assert len(set(pixels)) == 1
