"""Commands that try to break a run, in small; docs/reliability.md says how large they are at full size."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

COMMANDS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="needs fork")
def test_a_run_that_is_killed_anywhere_ends_as_if_nothing_had_been() -> None:
    command = [sys.executable, str(COMMANDS / "kill.py"), "10"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(
        r"1\d kills and \d other faults: every run ended as the undisturbed one, to the bit", done.stdout
    )


def test_bad_input_ends_in_an_error_that_says_something() -> None:
    command = [sys.executable, "-W", "ignore", str(COMMANDS / "fuzz.py"), "300"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"failures": 0' in done.stdout
