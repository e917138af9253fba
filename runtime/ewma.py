class Ewma:
    """An exponentially weighted moving average, of which the newest number is `share`.

    It begins with `start`, or where there is none with the first number; it is 0 before that.
    """

    __slots__ = ("_begun", "_share", "value")

    def __init__(self, share: float, start: float | None = None) -> None:
        self._share = share
        self._begun = start is not None
        self.value = start or 0.0

    def add(self, number: float) -> None:
        """Weigh in another number."""
        if self._begun:
            self.value += self._share * (number - self.value)
        else:
            self.value, self._begun = number, True
