"""Run every benchmark, one after the other and alone, and write their tables into docs/performance.md.

python benchmarks/run.py [NAME...]
"""

import os
import subprocess
import sys
from pathlib import Path

from shallower.reports import write_section

NAMES = (
    "overhead",
    "closed",
    "native",
    "flip",
    "training",
    "scale",
    "width",
    "ledger",
    "report",
    "bottleneck",
)
HERE = Path(__file__).parent


def main() -> None:
    failed = []
    for name in sys.argv[1:] or NAMES:
        done = subprocess.run(
            [sys.executable, str(HERE / f"{name}.py")],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=False,
        )
        print(f"{name}:\n{done.stdout}", flush=True)
        if done.returncode == 0 or "| what |" in done.stdout:
            write_section(HERE.parent / "docs" / "performance.md", name, done.stdout.strip() + "\n")
        if done.returncode != 0:
            failed.append(name)
    if failed:
        sys.exit(f"A bound does not hold, or the benchmark did not run: {', '.join(failed)}")


if __name__ == "__main__":
    main()
