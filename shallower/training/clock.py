"""Where the seconds of a run go."""

import time


class Clock:
    """Adds the time since the last lap to a name: one reading of the clock for each lap."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {"data": 0.0, "training": 0.0, "pruner": 0.0, "evaluation": 0.0}
        self._asked: dict[str, float] = {}
        self.start()

    def start(self) -> None:
        """What has passed since the last lap belongs to nobody."""
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] += now - self._last
        self._last = now

    @property
    def training(self) -> float:
        """All but evaluation."""
        return sum(seconds for name, seconds in self.seconds.items() if name != "evaluation")

    def since(self, name: str) -> float:
        """Seconds since this was last asked for `name` and answered with more than a fifth of one."""
        passed = self._last - self._asked.get(name, 0.0)
        if passed > 0.2:
            self._asked[name] = self._last
        return passed
