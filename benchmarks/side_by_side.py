"""Two ways to do a thing, timed in turn in one process: a ratio that the load of the machine cannot tilt."""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

WORDS = {True: "yes", False: "NO", None: "-"}


@dataclass(frozen=True)
class Ratio:
    """How long A took against B: the median of the pairs, and the middle half of them."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, ratios: list[float]) -> "Ratio":
        low, median, high = statistics.quantiles(ratios, n=4)
        return cls(median, low, high)

    def __str__(self) -> str:
        return f"{self.median:.4f} ({self.low:.4f} to {self.high:.4f})"


def seconds(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def compare(
    a: Callable[[], object], b: Callable[[], object], *, pairs: int = 30, warm: int = 3
) -> tuple[Ratio, float]:
    """The ratio of the times of `a` and `b`, run in turn, and the median seconds of `b`.

    The order changes from pair to pair, so that neither always runs in the other's wake.
    """
    for _ in range(warm):
        a(), b()
    ratios, base = [], []
    for pair in range(pairs):
        if pair % 2:
            of_b, of_a = seconds(b), seconds(a)
        else:
            of_a, of_b = seconds(a), seconds(b)
        ratios.append(of_a / of_b)
        base.append(of_b)
    return Ratio.of(ratios), statistics.median(base)


def verdict(rows: Sequence[tuple[str, str, str, bool | None]]) -> None:
    """Print what was measured against its bound as a table; exit with 1 if a bound does not hold.

    None is for a row without a bound.
    """
    print("| what | measured | bound | holds |\n| --- | --- | --- | --- |")
    for what, measured, bound, holds in rows:
        print(f"| {what} | {measured} | {bound} | {WORDS[holds]} |")
    sys.exit(1 if any(holds is False for *_, holds in rows) else 0)
