from collections.abc import Sequence

import msgspec

from runtime.request import RowRound


class EagleGenerationMetrics(msgspec.Struct):
    """What speculation has done since the start, whichever method proposed.

    `steps` counts verifications of a batch, `rounds` those of a row. `accepted` are the tokens
    that rounds gave; `accepted_by_position[i]` the rounds that gave more than i of them.
    """

    steps: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_by_position: list[int] = []
    draft_s: float = 0.0
    verify_s: float = 0.0
    commit_s: float = 0.0

    @property
    def accept_length(self) -> float:
        """Tokens a verification of one row; 0 before the first."""
        return accept_length(self.rounds, self.accepted)

    @property
    def accept_rates(self) -> list[float]:
        """How often a round gave more than i tokens, for each i; nothing without rounds."""
        if not self.rounds:
            return []
        return [count / self.rounds for count in self.accepted_by_position]

    def record(
        self, rows: Sequence[RowRound], *, draft_s: float, verify_s: float, commit_s: float
    ) -> None:
        """Count one round of a batch: its speculating rows, and the seconds of each stage."""
        self.steps += 1
        self.draft_s += draft_s
        self.verify_s += verify_s
        self.commit_s += commit_s
        for row in rows:
            self._record_row(row)

    def _record_row(self, row: RowRound) -> None:
        self.rounds += 1
        self.drafted += row.drafted
        self.accepted += row.accepted
        missing = row.accepted - len(self.accepted_by_position)
        self.accepted_by_position += [0] * missing
        for position in range(row.accepted):
            self.accepted_by_position[position] += 1


def accept_length(rounds: int, accepted: int) -> float:
    """Tokens a round; 0 where there was none."""
    return accepted / rounds if rounds else 0.0
