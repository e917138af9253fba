import msgspec


class PrefixMetrics(msgspec.Struct):
    """What a prefix cache has done since the start, and what it holds now.

    `rows` were looked up, `hits` of them found something; `queried` are their tokens, `reused`
    those of them that were not computed again. `skipped` tokens were there, but to load them would
    have taken longer. `evicted` pages are in no tier any more, and `damaged` ones were given up as
    what the disk gave was not them. `bytes` are by tier (`device`, `host`, `disk`), `pinned` those
    of them that clients keep.
    """

    rows: int = 0
    hits: int = 0
    queried: int = 0
    reused: int = 0
    skipped: int = 0
    evicted: int = 0
    damaged: int = 0
    pinned: int = 0
    bytes: dict[str, int] = {}
