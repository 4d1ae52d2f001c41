"""`torchrun -m shallower train`: the same run as one process, also if a rank is killed on the way."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

RECIPE = ["-m", "shallower", "train", "digits", "--epochs", "3", "--set", "theta_lr=0.03", "--no-worth"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def start(out: Path, *, ranks: bool, restarts: int = 0) -> subprocess.Popen[str]:
    first = [*TORCHRUN, "--max-restarts", str(restarts)] if ranks else [sys.executable]
    command = [*first, *RECIPE, "--out", str(out)]
    return subprocess.Popen(
        command, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def finish(process: subprocess.Popen[str]) -> None:
    said, _ = process.communicate(timeout=200)
    assert process.returncode == 0, said


def rates(run: Path) -> Any:
    with (run / "thetas.csv").open() as file:
        return np.array([[float(v) for v in row.values()] for row in csv.DictReader(file)])


def removals(run: Path) -> list[tuple[int, str]]:
    lines = (run / "events.jsonl").read_text().splitlines()
    return [(event["step"], event["block"]) for event in map(json.loads, lines)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: Any) -> Path:
    out = tmp_path_factory.mktemp("torchrun") / "two"
    finish(start(out, ranks=True))
    return out


def test_two_ranks_train_the_network_that_one_process_trains(undisturbed: Path, tmp_path: Path) -> None:
    alone = tmp_path / "one"
    finish(start(alone, ranks=False))
    assert removals(alone) == removals(undisturbed)
    np.testing.assert_allclose(rates(alone), rates(undisturbed), atol=1e-5)
    one, two = (load_file(run / "model.safetensors") for run in (alone, undisturbed))
    assert one.keys() == two.keys()
    for name in one:
        np.testing.assert_allclose(one[name], two[name], atol=1e-5)
    assert json.loads((undisturbed / "result.json").read_text())["machine"]["ranks"] == 2


def workers(parent: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(parent)], capture_output=True, text=True)
    return [int(line) for line in found.stdout.split()]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc through ps")
def test_a_killed_rank_is_restarted_and_the_run_ends_as_if_nothing_had_been(
    undisturbed: Path, tmp_path: Path
) -> None:
    out = tmp_path / "killed"
    process = start(out, ranks=True, restarts=1)
    deadline = time.monotonic() + 100
    while not (out / "checkpoint.pt").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    victim = workers(process.pid)[-1]
    os.kill(victim, signal.SIGKILL)
    finish(process)
    assert rates(out).tolist() == rates(undisturbed).tolist()
    one, two = (load_file(run / "model.safetensors") for run in (out, undisturbed))
    assert all(np.array_equal(one[name], two[name]) for name in one)
    assert one.keys() == two.keys()


def test_a_restart_keeps_its_hands_off_a_run_that_another_job_made(tmp_path: Path) -> None:
    """torchrun starts anew whatever ends in an error, also our refusal to touch a folder."""
    out = tmp_path / "precious"
    out.mkdir()
    (out / "result.json").write_text("mine")
    process = start(out, ranks=True, restarts=1)
    said, _ = process.communicate(timeout=200)
    assert process.returncode != 0
    assert said.count("exists and is not empty") >= 2
    assert [path.name for path in out.iterdir()] == ["result.json"]
    assert (out / "result.json").read_text() == "mine"
