"""The command line as a user types it."""

import io
import json
import os
import signal
import sys
import threading
import time

import pytest
from rich.console import Console
from typer.testing import CliRunner

from shallower import cli, data, reproduce
from shallower.cli import app
from shallower.recipes import RECIPES, recipe
from shallower.reports import read_results
from shallower.reproduce import place
from shallower.training import Interrupted, train, train_against_dense
from shallower.training.result import loss_of

runner = CliRunner()
QUICK = ["--set", "epochs=2", "--set", "finalize_epoch=1", "--set", "theta_lr=0.05"]


def run(*words: str):
    return runner.invoke(app, list(words))


def test_list_names_every_recipe():
    shown = run("list", "--json")
    assert shown.exit_code == 0
    assert [row["name"] for row in json.loads(shown.stdout)] == list(RECIPES)
    narrow = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["list"]).stdout
    assert all(f" {name} " in narrow for name in RECIPES)  # none is cut off


def test_inspect_counts_parameters_macs_and_blocks():
    shown = run("inspect", "mnist-fc10", "--json")
    found = json.loads(shown.stdout)
    assert (found["params"], found["macs"], len(found["blocks"])) == (170_410, 169_400, 9)
    assert found["blocks"][0] == {"name": "blocks.0", "params": 10_100, "macs": 10_000}
    assert "53.3 % of parameters" in run("inspect", "mnist-fc10").stdout


def test_inspect_looks_at_a_model_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "mine_for_inspection.py").write_text(
        "import torch\nfrom shallower import Residual\n"
        "def build():\n"
        "    blocks = [Residual(torch.nn.Linear(4, 4)) for _ in range(3)]\n"
        "    return torch.nn.Sequential(*blocks, torch.nn.Linear(4, 2)), torch.zeros(1, 4)\n"
        "def alone():\n    return torch.nn.Linear(4, 4)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = json.loads(run("inspect", "mine_for_inspection:build", "--json").stdout)
    assert (found["params"], found["macs"]) == (3 * 20 + 10, 3 * 16 + 8)
    assert found["blocks"][1] == {"name": "1", "kind": "Block", "params": 20, "macs": 16}
    assert "85.7 % of parameters" in run("inspect", "mine_for_inspection:build").stdout
    wrong = run("inspect", "mine_for_inspection:alone")
    assert (wrong.exit_code, "must return the model and an example" in wrong.stderr) == (2, True)
    missing = run("inspect", "mine_for_inspection:nothing")
    assert (missing.exit_code, "timm:NAME" in missing.stderr) == (2, True)


def test_export_writes_a_finished_run_and_names_what_is_none(tmp_path):
    folder = tmp_path / "run"
    assert run("train", "digits", *QUICK, "--out", str(folder), "--no-worth").exit_code == 0
    shown = run("export", str(folder), "--to", "safetensors", "--out", str(tmp_path / "net.safetensors"))
    assert shown.exit_code == 0, shown.output
    assert (tmp_path / "net.safetensors").stat().st_size > 1000
    wrong = run("export", str(folder), "--to", "tflite")
    assert (wrong.exit_code, "onnx, torch, safetensors" in wrong.stderr) == (2, True)
    nothing = run("export", str(tmp_path / "nowhere"))
    assert (nothing.exit_code, "structure.json" in nothing.stderr) == (2, True)


def test_train_prints_its_result_and_resumes_and_refuses(tmp_path):
    folder = str(tmp_path / "run")
    done = run("train", "digits", *QUICK, "--out", folder, "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["recipe"] == "digits"
    again = run("train", "digits", *QUICK, "--out", folder)
    assert again.exit_code == 2
    assert "--resume" in again.stderr
    resumed = run("train", "digits", *QUICK, "--out", folder, "--resume", "--json")
    assert json.loads(resumed.stdout)["test_loss"] == result["test_loss"]
    other = run("train", "digits-dense", *QUICK, "--out", folder, "--resume")
    assert other.exit_code == 2
    assert "another run" in other.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("train", "mnist"), "There is no recipe 'mnist'. There are: digits"),
        (("train", "digits", "--set", "gamma=1"), "It has: "),
        (("train", "digits", "--set", "epochs"), "field=value"),
        (("train", "digits", "--set", "epochs=-1"), "greater than or equal to 1"),
        (("inspect", "nothing"), "There is no recipe"),
        (("data", "nothing"), "There is no set 'nothing'"),
        (("reproduce", "nothing"), "There is no recipe"),
    ],
)
def test_a_wrong_word_ends_in_one_clear_line_and_exit_code_two(words, message):
    shown = run(*words)
    assert shown.exit_code == 2
    assert message in shown.stderr.replace("\n", " ")
    assert "Traceback" not in shown.output


def test_no_data_and_no_network_end_in_what_was_tried(tmp_path, monkeypatch):
    monkeypatch.setenv("SHALLOWER_DATA", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("urllib.request.urlopen", _refused)
    shown = run("train", "mnist-fc10", "--out", str(tmp_path / "run"))
    assert shown.exit_code == 2
    assert "shallower data mnist" in shown.stderr.replace("\n", " ")
    assert not (tmp_path / "run").exists()


def _refused(*args, **kwargs):
    raise OSError("no network")


def test_data_verifies_and_counts():
    assert "1,438 training and 359 test samples" in run("data", "digits").stdout.replace("\n", " ")


def test_reproduce_runs_each_seed_once_and_never_takes_another_result_for_its_own(tmp_path, monkeypatch):
    """One run; then a result of a seed that was not asked for, other settings, and a recipe that changed."""
    monkeypatch.chdir(tmp_path)
    shown = run("reproduce", "digits", "--seeds", "1", *QUICK)
    assert shown.exit_code == 0, shown.output
    row = "| digits epochs=2 theta_lr=0.05 finalize_epoch=1 | 1 |"
    assert row in shown.stdout
    (kept,) = (tmp_path / "results").rglob("*.json")
    assert kept.parent.name == "digits_epochs=2_theta_lr=0.05_finalize_epoch=1"
    older = json.loads(kept.read_text())
    assert older["settings"].pop("theta_optimizer") == "adam"  # as if it were from before there was a choice
    kept.write_text(json.dumps(older))
    before = kept.stat().st_mtime_ns
    (kept.parent / "seed7.json").write_text(kept.read_text())
    shown = run("reproduce", "digits", "digits", "--seeds", "1", *QUICK)
    assert (shown.exit_code, row in shown.stdout) == (0, True)
    assert kept.stat().st_mtime_ns == before
    (kept.parent / "seed1.json").write_text(kept.read_text())
    shown = run("reproduce", "digits", "--seeds", "2", *QUICK)
    assert (shown.exit_code, "seed=0 (now 1)" in shown.stderr.replace("\n", " ")) == (2, True)
    (kept.parent / "seed1.json").unlink()
    assert place(recipe("digits", {"log_gamma": -100})) != place(recipe("digits")) == "digits"
    monkeypatch.setitem(RECIPES, "digits", RECIPES["digits"].model_copy(update={"decay": 0.3}))
    shown = run("reproduce", "digits", "--seeds", "1", *QUICK)
    assert shown.exit_code == 2
    assert "decay=0.15 (now 0.3)" in shown.stderr.replace("\n", " ")


def test_train_and_reproduce_keep_a_setting_in_the_same_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words in (["--epochs", "1"], QUICK):
        assert run("train", "digits", "--no-worth", "--json", *words).exit_code == 0
    quick = "digits_epochs=2_theta_lr=0.05_finalize_epoch=1"
    short = "digits_epochs=1_theta_lr=0.35_finalize_epoch=1"
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {quick, short}
    monkeypatch.setattr(reproduce, "_run", None)  # nothing is left to be run
    for words in (["--epochs", "1"], QUICK):
        assert run("reproduce", "digits", "--seeds", "1", *words).exit_code == 0
    assert place(recipe("digits")) == "digits"


def test_long_settings_have_names_that_a_disk_takes_and_no_two_share_one(tmp_path):
    """Up to 180 bytes a name is the setting in words."""
    starts = [*("x" * number for number in (154, 155, 156, 157, 4000)), "ä" * 150]
    names = [place(recipe("digits", {"multipliers": {start: 1.0}})) for start in starts]
    assert names[:2] == [f"digits_multipliers=_{start}_1.0_" for start in starts[:2]]
    assert [len(name.encode()) for name in names] == [179, 180, 180, 180, 180, 179]
    assert len(set(names)) == 6
    for name in names:
        (tmp_path / name).mkdir()


def test_a_run_that_was_begun_with_other_settings_is_named_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reproduce, "_run", None)
    chosen, folder = recipe("digits", {"epochs": 2, "finalize_epoch": 1}), tmp_path / "runs/digits/seed1"

    def stop(run, folder):
        raise Interrupted

    with pytest.raises(Interrupted):
        train(chosen, data.load("digits"), folder, seed=1, note=stop)
    words = ["reproduce", "digits", "--seeds", "2"]
    shown = run(*words)
    text = shown.stderr.replace("\n", " ")
    assert (shown.exit_code, "settings: epochs=2 (now 40), finalize_epoch=1 (now 35). Finish" in text) == (
        2,
        True,
    )
    monkeypatch.setitem(RECIPES, "digits", chosen)
    shown = run(*words, "--bf16")
    assert "settings: bf16=False (now True). Finish" in shown.stderr.replace("\n", " ")
    (folder / "checkpoint.pt").write_bytes(b"half")
    shown = run(*words)
    assert (shown.exit_code, "Or remove runs/digits/seed1" in shown.stderr.replace("\n", " ")) == (2, True)


@pytest.mark.parametrize("text", [b'{"recipe"', b"[]", b"{}", b"\xff\xfe"])
def test_a_damaged_result_is_named(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results" / "digits").mkdir(parents=True)
    (tmp_path / "results" / "digits" / "seed0.json").write_bytes(text)
    with pytest.raises(ValueError, match=r"seed0\.json is no result of a run: "):
        read_results([tmp_path / "results"])
    shown = run("reproduce", "digits", "--seeds", "1")
    assert shown.exit_code == 2
    assert "results/digits/seed0.json is no result of a run; remove it" in shown.stderr.replace("\n", " ")


def test_a_place_for_the_table_is_looked_for_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.md").write_text("# nothing")
    for into, message in (("a.md", "FILE:SECTION"), ("a.md:x", "<!-- x -->"), ("b.md:x", "<!-- x -->")):
        shown = run("reproduce", "digits", "--seeds", "1", *QUICK, "--into", into)
        assert (shown.exit_code, message in shown.stderr) == (2, True)
    assert not (tmp_path / "runs").exists()


def test_inspect_names_what_does_not_fit_and_what_departs():
    shown = run("inspect", "mnist-fc10", "--set", 'options={"dept": 3}')
    assert (shown.exit_code, "do not fit fc on mnist" in shown.stderr) == (2, True)
    assert "departs from the printed settings: theta starts at 0.1" in run("inspect", "mnist-fc10").stdout


def test_a_run_that_fails_is_named_with_its_log(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = run("reproduce", "digits", "--seeds", "1", "--set", "optimizer=sgd", "--set", "lr=1e9")
    assert shown.exit_code == 2
    assert "digits_optimizer=sgd_lr=1e+09 seed 0" in shown.stderr.replace("\n", " ")
    (log,) = (tmp_path / "runs").rglob("log.txt")
    assert log.read_text().startswith("error: In epoch 0")


def test_a_table_is_replaced_only_by_that_of_runs_of_which_none_failed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.md").write_text("<!-- x -->\na good table\n<!-- /x -->\n")
    words = ["reproduce", "digits", "--seeds", "2", *QUICK, "--into", "a.md:x"]
    fails, begin = iter([0, 1]), reproduce._run
    with monkeypatch.context() as patched:
        patched.setattr(reproduce, "_run", lambda *args: next(fails) or begin(*args))
        shown = run(*words)
    assert (shown.exit_code, "seed 1; each folder" in shown.stderr.replace("\n", " ")) == (2, True)
    assert "a.md is as it was" in shown.stderr.replace("\n", " ")
    assert "a good table" in (tmp_path / "a.md").read_text()
    assert run(*words).exit_code == 0
    assert "| 2 |" in (tmp_path / "a.md").read_text()


SLEEPER = """
import pathlib, signal, sys, time
def stop(number, frame):
    time.sleep(0.2)  # as a checkpoint takes
    pathlib.Path(sys.argv[1], "stopped").write_text(str(number))
    raise SystemExit(1)
signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGTERM, stop)
pathlib.Path(sys.argv[1], "began").touch()
time.sleep(60)
"""


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_reproduce_reaches_its_runs_and_no_other_begins(tmp_path, monkeypatch, number, code):
    """Two of three runs are at work; it waits for both."""
    monkeypatch.chdir(tmp_path)
    begun = []

    def sleep(recipe, seed, folder, words, children):
        folder.mkdir(parents=True)
        begun.append(folder)
        return children.run([sys.executable, "-c", SLEEPER, str(folder)])

    def send():
        while sum((folder / "began").exists() for folder in begun) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    monkeypatch.setattr(reproduce, "_run", sleep)
    thread = threading.Thread(target=send)
    thread.start()
    shown = run("reproduce", "digits", "--seeds", "3", "--jobs", "2", *QUICK)
    thread.join()
    assert shown.exit_code == code
    assert "3 of 3 runs are not finished. The same command" in shown.stderr.replace("\n", " ")
    assert len(begun) == 2
    assert {(folder / "stopped").read_text() for folder in begun} == {str(int(number))}


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_stopped_ends_with_the_code_of_its_signal(tmp_path, monkeypatch, number, code):
    def interrupting(*args):
        os.kill(os.getpid(), number)
        return loss_of(*args)

    monkeypatch.setattr("shallower.training.run.loss_of", interrupting)
    shown = run("train", "digits", *QUICK, "--out", str(tmp_path / "run"))
    assert (shown.exit_code, "--resume" in shown.stderr) == (code, True)


def test_the_progress_of_a_run_and_of_its_twin_are_told_apart(tmp_path, monkeypatch):
    told = io.StringIO()
    monkeypatch.setattr(cli, "err", Console(file=told, force_terminal=True, width=200))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    chosen = recipe("digits", {"epochs": 2, "finalize_epoch": 1, "theta_lr": 0.05})
    with cli._progress(chosen, show=True) as report:
        found = train_against_dense(chosen, data.load("digits"), tmp_path, report=report, worth=False)
    pruned, dense = [line for line in told.getvalue().splitlines() if "MACs" in line][-2:]
    for line, name, result in ((pruned, "digits ", found[0]), (dense, "digits, dense twin ", found[1])):
        assert name in line
        assert "epoch 2/2  loss" in line
        assert f"blocks {result.blocks_kept}  MACs {result.macs:,}" in line
    assert found[0].macs < found[1].macs


def test_a_missing_tensorboard_names_its_package(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    shown = run("train", "digits", *QUICK, "--tensorboard", "--out", str(tmp_path / "run"))
    assert shown.exit_code == 2
    assert 'pip install "shallower[tensorboard]"' in shown.stderr.replace("\n", " ")


def test_the_page_of_a_run_is_written_while_it_goes_on(tmp_path, monkeypatch):
    """After each epoch and once more at the end, the twin's run on the same page."""
    from shallower.reports import page

    seen, write = [], page.write_report
    monkeypatch.setattr(page, "write_report", lambda runs, *rest: seen.append(runs) or write(runs, *rest))
    folder = tmp_path / "run"
    shown = run("train", "digits", *QUICK, "--report", "--against-dense", "--out", str(folder))
    assert shown.exit_code == 0, shown.output
    assert [[one.state for one in runs] for runs in seen] == [
        ["0 of 2 epochs", "1 of 2 epochs"],  # the dense twin comes first on the page, second in training
        ["1 of 2 epochs", "1 of 2 epochs"],
        ["1 of 2 epochs", "2 of 2 epochs"],
        ["2 of 2 epochs", "2 of 2 epochs"],
        ["finished", "finished"],
    ]
    assert "earns on the training set" in (folder / "report.html").read_text()


def test_tensorboard_has_the_curves_of_the_page(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = tmp_path / "run"
    words = ["--tensorboard", "--against-dense", "--out", str(folder), "--json"]
    result = json.loads(run("train", "digits", *QUICK, *words).stdout)["pruned"]
    found = accumulator.EventAccumulator(str(folder / "tensorboard")).Reload()
    last = {tag: found.Scalars(tag)[-1].value for tag in found.Tags()["scalars"]}
    assert last["share/load_ran"] == pytest.approx(result["training_macs_ratio"])
    assert last["share/params"] == pytest.approx(1 - result["ppr"] / 100)
    assert sum(rate == 1 for tag, rate in last.items() if tag.startswith("theta/")) == result["blocks_kept"]
    assert {"test_accuracy", "train_loss", "seconds_pruner"} <= set(last)
    twin = accumulator.EventAccumulator(str(folder / "dense" / "tensorboard")).Reload()
    assert [event.step for event in twin.Scalars("test_loss")] == [0, 1]
