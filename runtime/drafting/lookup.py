from collections.abc import Iterable


class NgramIndex:
    """Proposes what followed the newest tokens of a text where they occurred before.

    This is prompt lookup decoding (Saxena, 2023, github.com/apoorvumang/prompt-lookup-decoding)
    over prompt and answer alike. Suffixes of up to `longest` tokens lie in a trie that is walked
    from the newest token backwards, so a token costs at most `longest` steps; suffixes below
    `shortest` tokens propose nothing.
    """

    def __init__(self, token_ids: Iterable[int], longest: int, shortest: int) -> None:
        self._longest = longest
        self._shortest = shortest
        self._token_ids: list[int] = []
        # A node is a suffix; its number is its place in `_ends`, node 0 the empty one.
        self._children: dict[tuple[int, int], int] = {}
        self._ends = [0]
        self.append(token_ids)

    def append(self, token_ids: Iterable[int]) -> None:
        """Add the newest tokens."""
        for token in token_ids:
            self._enter()
            self._token_ids.append(token)

    def propose(self, count: int) -> list[int]:
        """At most `count` tokens after the longest, then latest, earlier occurrence; or none.

        An occurrence that reaches into the newest tokens goes on in its own continuation, so a
        text that repeats itself is proposed to repeat.
        """
        start = self._continuation()
        if start is None:
            return []
        known = self._token_ids
        period = len(known) - start
        return [known[start + place % period] for place in range(count)]

    def _enter(self) -> None:
        """Note the suffixes before the next token, which will be their continuation."""
        node = 0
        end = len(self._token_ids)
        for token in self._newest():
            node = self._children.setdefault((node, token), len(self._ends))
            if node == len(self._ends):
                self._ends.append(end)
            self._ends[node] = end

    def _continuation(self) -> int | None:
        """Where the longest suffix that occurred before went on; None when none is known."""
        node, length, start = 0, 0, None
        for token in self._newest():
            child = self._children.get((node, token))
            if child is None:
                break
            node, length = child, length + 1
            if length >= self._shortest:
                start = self._ends[node]
        return start

    def _newest(self) -> Iterable[int]:
        return reversed(self._token_ids[-self._longest :])
