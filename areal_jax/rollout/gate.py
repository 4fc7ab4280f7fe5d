"""The staleness gate: how many trajectories may be started, given the version that has been announced.

In: requests to start, and announcements (version, how many trajectories were lost). Out: may start, or not yet.
Called by the rollout controller alone. Waits for nobody: it owns no clock and no task; whoever is refused asks again
after the next `advance`.
"""

from areal_jax.algorithms.staleness import gate_is_open


class StalenessGate:
    """Counts trajectories from `counted` on and admits them by the paper's inequality.

    `counted` is what was trained or waits in the queue when the controller (re)starts; `lost` is the queue's total of
    lost trajectories at that same moment. What is lost later (failed, filtered, dropped as overdue) is taken off the
    count, so that a batch that can no longer become full by itself is topped up.
    """

    def __init__(
        self, *, batch_size: int, max_staleness: int, counted: int = 0, version: int = 0, lost: int = 0
    ) -> None:
        self.version = version
        self._batch_size = batch_size
        self._max_staleness = max_staleness
        self._started = counted
        self._lost_before = lost
        self._lost = lost

    @property
    def count(self) -> int:
        """Trajectories trained, waiting or in flight."""
        return self._started - (self._lost - self._lost_before)

    def may_start(self, trajectories: int) -> bool:
        """Whether a group of that many may start now: its last member must pass the inequality."""
        return gate_is_open(
            self.count + trajectories,
            batch_size=self._batch_size,
            version=self.version,
            max_staleness=self._max_staleness,
        )

    def start(self, trajectories: int) -> None:
        assert self.may_start(trajectories), f"started {trajectories} beyond the gate at {self.count}"
        self._started += trajectories

    def advance(self, version: int, lost: int) -> None:
        """Takes in an announcement. Raises ValueError when it goes backwards."""
        if version < self.version or lost < self._lost:
            raise ValueError(
                f"the trainer announced version {version} and {lost} lost trajectories after version {self.version} "
                f"and {self._lost}; it was restarted from an earlier checkpoint: restart the rollout controller too"
            )
        self.version = version
        self._lost = lost
