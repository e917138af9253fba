"""How a stored picture has to be turned, by the EXIF or XMP data that its file carries."""

import re
import struct

_TAG = 0x0112
_ENTRY = 12
# Kinds of a TIFF field that are whole numbers: byte, short and long, without and with a sign.
_WHOLE = {1: "B", 3: "H", 4: "I", 6: "b", 8: "h", 9: "i"}
_XMP = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
UPRIGHT = 1
LAST = 8


def orientation_of(exif: bytes, xmp: bytes = b"") -> int:
    """The orientation from 1 to 8 (EXIF 2.32, 4.6.4), 1 where nothing readable is said of it.

    `exif` is a TIFF structure, with or without the name of the block before it. What XMP says
    counts where EXIF says nothing.
    """
    try:
        found = _exif(exif.removeprefix(b"Exif\0\0"))
    except (struct.error, KeyError):
        found = None
    if found is None and (match := _XMP.search(xmp)):
        found = int(match[1])
    return found if found is not None and UPRIGHT <= found <= LAST else UPRIGHT


def _exif(tiff: bytes) -> int | None:
    order = {b"II*\0": "<", b"MM\0*": ">"}[tiff[:4]]
    (start,) = struct.unpack_from(f"{order}I", tiff, 4)
    (entries,) = struct.unpack_from(f"{order}H", tiff, start)
    found = None
    # Of a list that is cut off, what is there counts.
    end = min(start + 2 + entries * _ENTRY, len(tiff) - _ENTRY + 1)
    for place in range(start + 2, end, _ENTRY):
        tag, kind, count = struct.unpack_from(f"{order}HHI", tiff, place)
        if tag == _TAG and count == 1 and kind in _WHOLE:
            (found,) = struct.unpack_from(f"{order}{_WHOLE[kind]}", tiff, place + 8)
    return found
