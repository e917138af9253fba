import msgspec


class StageMetrics(msgspec.Struct):
    """What one stage (prefill, generation) has done since the start."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def record(self, tokens: int, seconds: float) -> None:
        """Count one step."""
        self.steps += 1
        self.tokens += tokens
        self.seconds += seconds
