import msgspec


class StageMetrics(msgspec.Struct):
    """What one stage (prefill, generation) has done since the start.

    `host_seconds` are what queueing the steps took, while the device may be at work on others.
    `tokens` of prompts were computed, and `reused` ones came from the prefix cache in their place.
    Those of the generation were given to rows: no token behind a reply's end, no proposal that was
    refused. A row's first token is the prefill's.
    """

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    host_seconds: float = 0.0
    reused: int = 0

    def record(self, tokens: int, seconds: float, host_seconds: float = 0.0) -> None:
        """Count one step."""
        self.host_seconds += host_seconds
        self.steps += 1
        self.tokens += tokens
        self.seconds += seconds
