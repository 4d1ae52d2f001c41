"""Runs of a few epochs: their folder, their resume, their ends."""

import csv
import json
import os
import signal
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import shallower
from shallower import data
from shallower.data import Samples
from shallower.export import FORMS, export
from shallower.files import locked
from shallower.ledger import count_macs
from shallower.recipes import Paper, Recipe, recipe
from shallower.reports.live import following
from shallower.reports.runs import load_run
from shallower.training import (
    Interrupted,
    Machine,
    Result,
    RunError,
    begun_by,
    certify_run,
    launched,
    train,
    train_against_dense,
)
from shallower.training.result import loss_of
from shallower.training.run import Run

QUICK = {"epochs": 3, "finalize_epoch": 2, "theta_lr": 0.05, "log_gamma": -100.0}


@pytest.fixture(scope="module")
def digits() -> data.Task:
    return data.load("digits")


def quick(**fields) -> Recipe:
    options = {"inputs": 64, "width": 16, "depth": 4, "outputs": 10}
    return recipe("digits", {**QUICK, "options": options, **fields})


def rows(path) -> list[dict[str, str]]:
    with path.open() as file:
        return [{k: v for k, v in row.items() if not k.startswith("seconds")} for row in csv.DictReader(file)]


def test_a_run_leaves_everything_in_its_folder(digits, tmp_path):
    result = train(quick(), digits, tmp_path / "run", seed=1)
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {
        *("recipe.json", "metrics.csv", "thetas.csv", "events.jsonl", "result.json", "checkpoint.pt"),
        *("model.safetensors", "structure.json", "costs.csv", "worth.csv"),
    }
    assert [row["name"] for row in rows(tmp_path / "run" / "costs.csv")] == [
        *(f"blocks.{i}" for i in range(4)),
        "(whole network)",
    ]
    assert [row["block"] for row in rows(tmp_path / "run" / "worth.csv")] == result.survivors
    assert Result.model_validate_json((tmp_path / "run" / "result.json").read_text()) == result
    assert json.loads((tmp_path / "run" / "recipe.json").read_text())["seed"] == 1
    assert len(rows(tmp_path / "run" / "metrics.csv")) == len(rows(tmp_path / "run" / "thetas.csv")) == 3
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert {e["block"] for e in events} | set(result.survivors) == {f"blocks.{i}" for i in range(4)}
    assert result.layers == 2 + 2 * result.blocks_kept
    assert result.params < result.params_dense
    assert 0 < result.training_macs_ratio < 1


def test_a_dense_run_has_no_rates_and_no_removals_and_says_so(digits, tmp_path):
    train(quick(log_gamma=None), digits, tmp_path)
    assert [(tmp_path / name).read_text() for name in ("thetas.csv", "events.jsonl")] == ["", ""]
    found = load_run(tmp_path)
    assert (len(found.metrics), found.thetas, found.events, found.removed) == (3, [], [], set())
    with following(tmp_path, report=True):
        pass
    assert (tmp_path / "report.html").stat().st_size > 1000


def test_the_stored_network_is_the_trained_one(digits, tmp_path):
    result = train(quick(), digits, tmp_path, seed=0)
    net = shallower.load(tmp_path)
    images, labels = next(iter(digits.batches("test", 1000)))
    with torch.no_grad():
        right = (net(images).argmax(1) == labels).float().mean().item()
    assert 100 * right == pytest.approx(result.test_accuracy)
    assert sum(p.numel() for p in net.parameters()) == result.params_absorbed


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"estimator": "flip"},
        {"begin_epoch": 1, "estimate_every": 3},
        {"theta_optimizer": "sgd", "theta_lr": 1e-4},
        {"log_gamma": None},
        {"optimizer": "sgd", "cosine": True},
    ],
)
@pytest.mark.parametrize("stop", [10, 60, 100])
def test_an_interrupted_run_resumes_to_the_same_end_bit_for_bit(digits, tmp_path, monkeypatch, fields, stop):
    """Stopped in the first, the second and the fine-tuning epoch."""
    untimed = {"seconds": 0.0, "seconds_spent": {}}
    whole = train(quick(**fields), digits, tmp_path / "whole", seed=3)
    calls = []

    def interrupting(*args):
        calls.append(1)
        if len(calls) == stop:
            os.kill(os.getpid(), signal.SIGINT)
        return loss_of(*args)

    with monkeypatch.context() as patched:
        patched.setattr("shallower.training.run.loss_of", interrupting)
        with pytest.raises(Interrupted, match="--resume"):
            train(quick(**fields), digits, tmp_path / "part", seed=3)
    resumed = train(quick(**fields), digits, tmp_path / "part", seed=3, resume=True)
    assert resumed.model_copy(update=untimed) == whole.model_copy(update=untimed)
    assert rows(tmp_path / "part" / "metrics.csv") == rows(tmp_path / "whole" / "metrics.csv")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "part")]
    assert weights[0] == weights[1]


def test_rates_learn_from_the_epoch_they_begin_at_and_in_every_kth_step(digits, tmp_path):
    late = quick(begin_epoch=1, estimate_every=5, estimator="flip", theta=0.9, theta_lr=0.2, log_gamma=-1e4)
    train(late, digits, tmp_path, worth=False)
    first, second, _ = (
        [float(rate) for name, rate in row.items() if name != "epoch"]
        for row in rows(tmp_path / "thetas.csv")
    )
    assert set(first) == {0.9}
    assert set(second) != {0.9}
    steps = [json.loads(line)["step"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert steps
    assert {step % 5 for step in steps if step < 2 * 45} == {1}  # counted from 1; 45 steps in an epoch


def test_plain_gradient_steps_move_rates_in_proportion_to_what_blocks_lack(digits):
    fields = {"theta_optimizer": "sgd", "theta_lr": 1e-5, "theta": 0.5, "log_gamma": -100.0}
    run = Run(quick(**fields), digits, seed=0, machine=Machine("cpu"))
    inputs, labels = next(iter(run.loader))
    run.loss_on(run.net, inputs, labels).backward()
    run.optimizer.step()
    run.pruner.step()
    lacks = run.pruner.vitals.change + 100.0  # of one step: its estimates
    assert len(set(lacks.tolist())) > 1
    torch.testing.assert_close(run.pruner.theta, 0.5 - 1e-5 * lacks)  # (2), (5)


def test_the_ramp_of_a_run_begins_where_its_rates_begin_to_learn(digits):
    run = Run(quick(begin_epoch=1, ramp_epochs=1.5, log_gamma=-90.0), digits, seed=0, machine=Machine("cpu"))
    steps = len(run.loader)
    assert [run.pruner.log_gamma(step) for step in (0, steps, 2 * steps)] == [0.0, 0.0, -90.0]
    assert run.pruner.log_gamma(steps + 1) == pytest.approx(-90.0 / (round(1.5 * steps) - steps))


def test_a_multiplier_is_of_a_block_or_of_all_in_a_module_and_the_innermost_counts(digits):
    fields = {"options": {"depth": 12}, "multipliers": {"blocks.1": 3.0, "blocks": 2.0}}
    run = Run(quick(**fields), digits, seed=0, machine=Machine("cpu"))
    assert run.pruner.multipliers.tolist() == [2.0, 3.0, *[2.0] * 10]  # blocks.10 is not in blocks.1


def test_only_images_are_cropped_and_flipped(tmp_path):
    with pytest.raises(RunError, match=r"diabetes has inputs \(10,\): set augment=false"):
        train(recipe("diabetes", {"augment": True}), data.load("diabetes"), tmp_path)


def test_a_recipe_in_which_no_rate_ever_learns_is_refused(digits, tmp_path):
    with pytest.raises(RunError, match=r"estimate_every=1000 .* first in step 1000, .* after 90\."):
        train(quick(begin_epoch=1, estimate_every=1000), digits, tmp_path)


@pytest.mark.parametrize("end", [None, 3])
def test_a_run_finalised_at_its_very_end_is_told_as_it_ended(digits, tmp_path, end):
    result = train(quick(finalize_epoch=end, threshold=0.9), digits, tmp_path)
    assert result.blocks_kept < 4
    last = rows(tmp_path / "metrics.csv")[-1]
    assert (int(last["blocks"]), int(last["macs"])) == (result.blocks_kept, result.macs)
    events = [json.loads(line)["block"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert {*events, *result.survivors} == {f"blocks.{i}" for i in range(4)}
    final = {name: float(rate) for name, rate in rows(tmp_path / "thetas.csv")[-1].items() if name != "epoch"}
    assert final == {f"blocks.{i}": float(f"blocks.{i}" in result.survivors) for i in range(4)}


def test_twins_of_other_settings_have_other_labels(digits, tmp_path):
    labels = [
        train_against_dense(quick(**fields), digits, tmp_path / str(k), worth=False)[1].label
        for k, fields in enumerate(({}, {"lr": 0.01}))
    ]
    assert all(label.startswith("digits dense") or " dense" in label for label in labels)
    assert "lr=0.01" in labels[1]
    assert labels[0] != labels[1]


def test_the_comparison_is_of_the_pruned_run_against_its_twin(digits, tmp_path):
    pruned, dense = train_against_dense(quick(), digits, tmp_path)
    found = json.loads((tmp_path / "against_dense.json").read_text())
    assert found["seconds_ratio"] == pytest.approx(pruned.seconds / dense.seconds)
    assert found["accuracy_difference"] == pytest.approx(pruned.test_accuracy - dense.test_accuracy)
    assert found["loss_difference"] == pytest.approx(pruned.test_loss - dense.test_loss)
    assert found["training_macs_ratio"] == pruned.training_macs_ratio < 1
    with pytest.raises(RunError, match="dense itself"):
        train_against_dense(quick(log_gamma=None), digits, tmp_path / "other")


def test_a_pair_stopped_before_the_twins_first_checkpoint_is_resumed(digits, tmp_path):
    whole = train_against_dense(quick(), digits, tmp_path / "whole")

    def stop(run, folder):
        raise Interrupted

    with pytest.raises(Interrupted):
        train_against_dense(quick(), digits, tmp_path / "pair", note=stop)
    assert not (tmp_path / "pair" / "dense" / "checkpoint.pt").exists()
    resumed = train_against_dense(quick(), digits, tmp_path / "pair", resume=True)
    assert [r.test_loss for r in resumed] == [r.test_loss for r in whole]


def test_a_run_that_is_replaced_takes_its_twin_and_its_curves_with_it(digits, tmp_path):
    train_against_dense(quick(), digits, tmp_path / "run")
    (tmp_path / "run" / "tensorboard").mkdir()
    train(quick(), digits, tmp_path / "run", overwrite=True, worth=False)
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert not names & {"dense", "tensorboard", "against_dense.json", "worth.csv"}


def test_a_run_that_is_replaced_takes_with_it_what_was_made_of_its_network(digits, tmp_path):
    """Its certificate, its page, and all forms that it was exported to; other files stay."""
    train(quick(epochs=2), digits, tmp_path, worth=False)
    certify_run(tmp_path, digits, steps=0)
    for form, (name, _) in FORMS.items():
        if form == "safetensors":
            export(shallower.load(tmp_path), torch.zeros(1, 1, 8, 8), form, tmp_path / name)
        else:  # slow to make
            (tmp_path / name).write_bytes(b"of the old network")
    with following(tmp_path, report=True):
        pass
    (tmp_path / "notes.txt").write_text("mine")
    train(quick(epochs=2), digits, tmp_path, overwrite=True, worth=False)
    train(quick(epochs=2), digits, tmp_path / "new", worth=False)
    names = {path.name for path in (tmp_path / "new").iterdir()}
    assert {path.name for path in tmp_path.iterdir()} == names | {"notes.txt", "new"}


def test_the_dense_twin_sees_the_same_data_and_is_the_dense_run(digits, tmp_path):
    pruned, dense = train_against_dense(quick(), digits, tmp_path / "both", seed=3)
    alone = train(quick(log_gamma=None), digits, tmp_path / "dense", seed=3)
    assert dense.test_loss == alone.test_loss
    assert pruned.test_loss == train(quick(), digits, tmp_path / "pruned", seed=3).test_loss
    assert (pruned.params_dense, pruned.macs_dense) == (dense.params, dense.macs)
    assert dense.training_macs_ratio == 1.0 > pruned.training_macs_ratio
    resumed = train_against_dense(quick(), digits, tmp_path / "both", seed=3, resume=True)
    assert [r.test_loss for r in resumed] == [pruned.test_loss, dense.test_loss]


def test_the_seconds_of_a_run_are_accounted_for(digits, tmp_path):
    result = train(quick(), digits, tmp_path)
    parts = result.seconds_spent
    assert set(parts) == {"data", "training", "pruner", "evaluation"}
    assert all(value > 0 for value in parts.values())
    assert result.seconds == pytest.approx(sum(parts.values()) - parts["evaluation"])


def test_two_seeds_differ_and_one_repeats(digits, tmp_path):
    results = [train(quick(), digits, tmp_path / str(i), seed=s) for i, s in enumerate((0, 0, 1))]
    assert results[0].test_loss == results[1].test_loss != results[2].test_loss


def test_a_regression_reports_its_error(tmp_path):
    result = train(recipe("diabetes", {"epochs": 5, "finalize_epoch": 4}), data.load("diabetes"), tmp_path)
    assert result.test_accuracy is None
    assert result.test_rmse == pytest.approx((2 * result.test_loss) ** 0.5)


@pytest.mark.parametrize(
    "machine", [Machine("cpu", bf16=True), Machine("cpu", channels_last=True), Machine("cpu", compile=True)]
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_other_arithmetic_trains_the_same_network_up_to_rounding(digits, tmp_path, machine, monkeypatch):
    compiled = partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", compiled)
    recipe = quick(
        network="cnn",
        options={"depth": 10},
        task="mnist",
        epochs=1,
        finalize_epoch=None,
        theta=1.0,
        theta_lr=1e-6,
    )
    images = Samples(torch.rand(40, 1, 28, 28), torch.arange(40) % 10)
    task = replace(digits, name="mnist", train=images, test=images)
    found = train(recipe, task, tmp_path / "a", machine=machine)
    plain = train(recipe, task, tmp_path / "b")
    assert found.test_loss == pytest.approx(plain.test_loss, rel=0.02 if machine.bf16 else 1e-3)
    assert found.machine["channels_last"] == machine.channels_last


def test_a_folder_that_exists_is_not_touched(digits, tmp_path):
    train(quick(epochs=2), digits, tmp_path, worth=False)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(RunError, match=r"--resume.*--overwrite.*--out"):
        train(quick(), digits, tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("recipe", [None, "{}", "[]", "half"])
def test_a_folder_that_is_no_run_is_not_overwritten(digits, tmp_path, overwrite, recipe):
    (tmp_path / "tensorboard").mkdir()
    mine = [tmp_path / name for name in ("metrics.csv", "tensorboard/events", "model.safetensors")]
    for path in mine:
        path.write_text("mine")
    if recipe is not None:
        (tmp_path / "recipe.json").write_text(recipe)
    with pytest.raises(RunError, match=r"no recipe\.json of one.*--out"):
        train(quick(), digits, tmp_path, overwrite=overwrite)
    assert {path.read_text() for path in mine} == {"mine"}


@pytest.mark.parametrize("left", ["log.txt", ".job", ".recipe.json.1.part", "recipe.json"])
def test_a_run_killed_in_its_first_moments_can_be_overwritten(digits, tmp_path, left):
    (tmp_path / left).write_text('{"seed": 0}')
    train(quick(epochs=1, finalize_epoch=None), digits, tmp_path, overwrite=True, worth=False)
    assert (tmp_path / "result.json").exists()


def test_resuming_with_another_recipe_or_seed_is_refused(digits, tmp_path):
    train(quick(epochs=2), digits, tmp_path)
    for fields, seed, named in (
        ({"epochs": 2, "lr": 0.1, "decay": 2.0}, 0, r"lr=0\.001 \(now 0\.1\), decay=.* \(now 2\.0\)\."),
        ({"epochs": 2}, 5, r"seed=0 \(now 5\)\."),
    ):
        with pytest.raises(RunError, match=f"another run: {named}"):
            train(quick(**fields), digits, tmp_path, seed=seed, resume=True)
    other = quick(epochs=2).model_copy(update={"name": "mine"})
    with pytest.raises(RunError, match=r"recipe=digits \(now mine\)\."):
        train(other, digits, tmp_path, resume=True)


def test_remarks_in_a_recipe_may_change_before_a_resume(digits, tmp_path):
    with pytest.raises(Stop):
        train(quick(epochs=2), digits, tmp_path, worth=False, note=stop_after_an_epoch)
    said = quick(epochs=2).model_copy(update={"departs": "in words", "paper": Paper(accuracy=99.0)})
    assert train(said, digits, tmp_path, worth=False, resume=True).test_accuracy is not None


def test_a_run_is_resumed_or_overwritten_not_both(digits, tmp_path):
    train(quick(epochs=2), digits, tmp_path, worth=False)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(RunError, match=r"--resume and --overwrite.*Give one"):
        train(quick(epochs=2), digits, tmp_path, resume=True, overwrite=True)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_resuming_from_nothing_or_from_a_damaged_file_is_refused(digits, tmp_path):
    with pytest.raises(RunError, match="without --resume"):
        train(quick(), digits, tmp_path, resume=True)
    (tmp_path / "checkpoint.pt").write_bytes(b"no checkpoint")
    with pytest.raises(RunError, match="--overwrite"):
        train(quick(), digits, tmp_path, resume=True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"network": "nothing"}, "There is no network 'nothing'; there are"),
        ({"options": {"colour": 1}}, "do not fit mlp"),
        (
            {"options": {"inputs": 63, "width": 4, "depth": 2, "outputs": 10}},
            r"does not take the inputs \(1, 8, 8\)",
        ),
    ],
)
def test_a_network_that_does_not_fit_ends_in_a_clear_error(digits, tmp_path, fields, message):
    with pytest.raises(RunError, match=message):
        train(quick(**fields), digits, tmp_path / "run")


def test_a_device_that_is_not_there_ends_in_a_clear_error(digits, tmp_path):
    with pytest.raises(RunError, match="--device cpu"):
        train(quick(), digits, tmp_path / "run", machine=Machine("nowhere"))


@pytest.mark.parametrize("log_gamma", [None, -28.0])
def test_a_loss_that_explodes_names_the_epoch_and_keeps_the_checkpoint(digits, tmp_path, log_gamma):
    """The first epoch goes well, and then the learning rate is a million times larger."""
    steep = quick(optimizer="sgd", lr=1e-3, log_gamma=log_gamma, finetune_lr=1e6, finalize_epoch=1)
    if log_gamma is not None:
        steep = quick(optimizer="sgd", lr=1e6)
        with pytest.raises(RunError, match=r"In epoch 0: At step .*--overwrite --set lr"):
            train(steep, digits, tmp_path)
        return
    with pytest.raises(RunError, match=r"nan or inf in epoch 1, at step 4[67]\..*--overwrite --set lr"):
        train(steep, digits, tmp_path)
    kept = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert kept["loader"]["epoch"] == 1
    assert all(tensor.isfinite().all() for tensor in kept["model"].values())


FOREIGN = {
    "a list": lambda state: [1],
    "a tensor": lambda state: torch.ones(3),
    "of something else": lambda state: {"state_dict": {}},
    "no load": lambda state: state | {"load": None},
    "no history": lambda state: state | {"history": "[]"},
    "history of another kind": lambda state: state | {"history": "3"},
    "an empty optimizer": lambda state: state | {"optimizer": {}},
    "an epoch in words": lambda state: state | {"loader": state["loader"] | {"epoch": "one"}},
    "no recipe": lambda state: state | {"recipe": "digits"},
    "no pruner": lambda state: state | {"pruner": None},
    "other weights": lambda state: state | {"model": {"x": torch.ones(1)}},
    "moments of another shape": lambda state: with_moment(state, "exp_avg", torch.zeros(3)),
    "moments that are not finite": lambda state: with_moment(state, "exp_avg_sq", torch.tensor(torch.nan)),
    "a moment too few": lambda state: with_moment(state, "exp_avg", None),
    "a learning rate in words": lambda state: with_group(state, lr="x"),
    "another learning rate": lambda state: with_group(state, lr=0.5),
    "no betas": lambda state: with_group(state, betas=(0.9,)),
    "another decay": lambda state: with_group(state, weight_decay=1.0),
    "another schedule": lambda state: state | {"scheduler": state["scheduler"] | {"base_lrs": [0.5]}},
    "other clocks": lambda state: state | {"seconds": {"a": 1.0}},
    "other columns": lambda state: state | {"history": '[{"x": 1}]'},
    "other rates": lambda state: state | {"rates": '[{"y": 1}]'},
    "another batch": lambda state: state | {"loader": state["loader"] | {"batch": 10}},
    "another load": lambda state: state | {"load": state["load"] | {"dense": 1}},
    "another end of pruning": lambda state: with_pruner(state, finalized=True),
    "a rate of theta below 0": lambda state: with_theta_lr(state, -1.0),
    "another rate of theta": lambda state: with_theta_lr(state, 1.0),
}


def with_moment(state, name, value):
    kept = {k: v for k, v in state["optimizer"]["state"][0].items() if k != name}
    entry = kept if value is None else kept | {name: value}
    return state | {"optimizer": state["optimizer"] | {"state": state["optimizer"]["state"] | {0: entry}}}


def with_group(state, **values):
    (group,) = state["optimizer"]["param_groups"]
    return state | {"optimizer": state["optimizer"] | {"param_groups": [group | values]}}


def with_pruner(state, **values):
    return state | {"pruner": state["pruner"] | values}


def with_theta_lr(state, lr):
    theirs = state["pruner"]["theta_optimizer"]
    groups = [group | {"lr": lr} for group in theirs["param_groups"]]
    return with_pruner(state, theta_optimizer=theirs | {"param_groups": groups})


@pytest.mark.parametrize("kind", sorted(FOREIGN))
def test_a_checkpoint_of_another_shape_ends_in_a_clear_error(digits, tmp_path, kind):
    """One from the middle of a run, so that training would go on with it."""
    chosen, path = quick(epochs=2, finalize_epoch=None), tmp_path / "checkpoint.pt"
    with pytest.raises(Stop):
        train(chosen, digits, tmp_path, worth=False, note=stop_after_an_epoch)
    torch.save(FOREIGN[kind](torch.load(path, weights_only=True)), path)
    before = path.read_bytes()
    with pytest.raises(RunError, match=r"checkpoint\.pt (is no checkpoint|does not fit|has a recipe)"):
        train(chosen, digits, tmp_path, resume=True, worth=False)
    assert path.read_bytes() == before


class Stop(Exception):
    pass


def stop_after_an_epoch(run, folder):
    raise Stop


def test_two_runs_in_two_threads_are_each_as_it_is_alone(digits, tmp_path):
    """The global generator, from which initial weights come, belongs to all threads."""
    alone = [Run(quick(), digits, seed=seed, machine=Machine("cpu")).model.state_dict() for seed in (1, 2)]
    found: dict[int, list[dict[str, torch.Tensor]]] = {1: [], 2: []}

    def build(seed):
        for _ in range(20):
            found[seed].append(Run(quick(), digits, seed=seed, machine=Machine("cpu")).model.state_dict())

    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=build, args=(seed,)) for seed in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(switch)
    for seed, expected in zip((1, 2), alone, strict=True):
        assert len(found[seed]) == 20
        for state in found[seed]:
            assert all(torch.equal(state[name], value) for name, value in expected.items())


@pytest.mark.parametrize(("count", "job"), [("0", "id"), ("2", "id")])
def test_one_rank_that_torchrun_starts_again_goes_on_with_its_run(digits, tmp_path, monkeypatch, count, job):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", job)
    monkeypatch.setenv("WORLD_SIZE", "1")
    with launched(Machine("cpu")) as (launch, _):
        assert launch.restarted == (count != "0")
        with pytest.raises(Stop):
            train(quick(), digits, tmp_path, worth=False, note=stop_after_an_epoch, job=launch.job)
        assert begun_by(tmp_path, launch.job) == {"resume": True, "overwrite": False}
        assert begun_by(tmp_path, "another") == {}


def test_a_full_disk_leaves_the_last_checkpoint(digits, tmp_path, monkeypatch):
    """The write itself fails, wherever in the file."""
    train(quick(epochs=2), digits, tmp_path)
    before = (tmp_path / "checkpoint.pt").read_bytes()

    def full(path, data):
        with path.open("wb") as file:
            file.write(bytes(data)[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"checkpoint\.pt could not be written \(No space.*Make room"):
        Run(quick(epochs=2), digits, seed=0, machine=Machine()).save(tmp_path)
    assert (tmp_path / "checkpoint.pt").read_bytes() == before
    assert not list(tmp_path.glob(".*part"))


@pytest.mark.parametrize("written", [0, 1])
def test_a_full_disk_promises_a_resume_only_from_a_checkpoint(digits, tmp_path, monkeypatch, written):
    """The first checkpoint fails, or the second; then what is promised is done."""
    write, calls = Path.write_bytes, []

    def full(path, data):
        calls.append(path)
        if len(calls) > written:
            raise OSError(28, "No space left on device")
        return write(path, data)

    short = quick(epochs=2, finalize_epoch=None)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match="--resume" if written else "--overwrite") as failure:
            train(short, digits, tmp_path, worth=False)
    assert ("--resume" in str(failure.value)) == bool(written)
    train(short, digits, tmp_path, worth=False, resume=bool(written), overwrite=not written)


def test_a_run_stopped_before_its_first_checkpoint_is_to_be_overwritten(digits, tmp_path, monkeypatch):
    def killed(*args):
        raise Stop

    with monkeypatch.context() as patched:
        patched.setattr("shallower.training.run.loss_of", killed)
        with pytest.raises(Stop):
            train(quick(), digits, tmp_path)
    for resume in (False, True):
        with pytest.raises(RunError) as refusal:
            train(quick(), digits, tmp_path, resume=resume)
        assert "--overwrite" in str(refusal.value)
        assert "by --resume" not in str(refusal.value)
        assert "without --resume" not in str(refusal.value)
    train(quick(epochs=1, finalize_epoch=None), digits, tmp_path, overwrite=True, worth=False)


def test_a_finished_run_whose_checkpoint_is_gone_is_not_called_unfinished(digits, tmp_path):
    train(quick(epochs=1, finalize_epoch=None), digits, tmp_path, worth=False)
    (tmp_path / "checkpoint.pt").unlink()
    for resume in (False, True):
        with pytest.raises(RunError, match=r"is finished, and its checkpoint is gone\..*--out"):
            train(quick(epochs=1, finalize_epoch=None), digits, tmp_path, resume=resume)


def test_a_run_that_cannot_begin_leaves_the_one_before_it(digits, tmp_path):
    train(quick(epochs=2), digits, tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    for wrong in (
        {"machine": Machine("nowhere")},
        {"machine": Machine("meta")},
        {"recipe": quick(options={"outputs": 5})},
    ):
        options = {"recipe": quick(epochs=2), **wrong}
        with pytest.raises(RunError):
            train(options.pop("recipe"), digits, tmp_path, overwrite=True, **options)
        assert sorted(path.name for path in tmp_path.iterdir()) == names


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"options": {"outputs": 5}}, r"gives \(5,\) values for a sample, but digits needs \(10,\)"),
        ({"multipliers": {"stge": 5.0}}, r"stge is no block, nor holds one.*The blocks are blocks\.0"),
        ({"multipliers": {"blocks.": 5.0}}, r"blocks\. is no block"),
        ({"options": {"dpth": 3}}, r"'dpth'\. It has: inputs, width, depth, outputs"),
        ({"options": {"width": 10**8}}, r"do not fit mlp: .*allocate"),
    ],
)
def test_settings_that_would_train_something_else_are_refused(digits, tmp_path, fields, message):
    with pytest.raises(RunError, match=message):
        train(quick(**fields), digits, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_goes_on_with_the_arithmetic_that_it_began_with(digits, tmp_path):
    def stop(run, folder):
        raise Interrupted

    with pytest.raises(Interrupted):
        train(quick(), digits, tmp_path, note=stop)
    with pytest.raises(RunError, match=r"'bf16': False.*'bf16': True.*as they were"):
        train(quick(), digits, tmp_path, resume=True, machine=Machine(bf16=True))


def test_the_seconds_of_a_dense_run_are_those_of_its_steps(digits, tmp_path):
    spent = train(quick(log_gamma=None), digits, tmp_path).seconds_spent
    assert spent["training"] > 2 * spent["data"] > 0
    assert spent["pruner"] == 0


def test_progress_is_told_in_short_epochs_too(digits, tmp_path):
    told = []
    train(quick(), digits, tmp_path, report=lambda run, epoch, loss: told.append(epoch))
    assert set(told) == {0, 1, 2}


@pytest.mark.parametrize("network", [{}, {"network": "cnn", "options": {"depth": 10}}, {"log_gamma": None}])
def test_the_macs_of_a_run_are_those_of_its_network_at_any_step(digits, tmp_path, monkeypatch, network):
    """Counted once and added up, against counted anew."""
    monkeypatch.setattr("shallower.training.clock.Clock.since", lambda *args: 1.0)  # it is told at every step
    images = Samples(torch.rand(200, 1, 28, 28), torch.arange(200) % 10)
    task = replace(digits, train=images, test=images) if "network" in network else digits
    told = []

    def compare(run, epoch, loss):
        told.append(run.macs)
        assert run.macs == count_macs(run.model, run.example)

    result = train(quick(theta_lr=0.2, **network), task, tmp_path, report=compare, worth=False)
    assert told[-1] == result.macs
    assert (told[-1] < told[0]) == ("log_gamma" not in network)


def test_training_works_outside_the_main_thread(digits, tmp_path):
    found = []
    thread = threading.Thread(target=lambda: found.append(train(quick(epochs=2), digits, tmp_path)))
    thread.start()
    thread.join()
    assert found


@pytest.mark.skipif(os.name != "posix", reason="locks of folders")
def test_two_processes_do_not_train_in_one_folder(digits, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with locked(folder) as mine:
        assert mine
        with pytest.raises(RunError, match="Another process trains in"):
            train(quick(), digits, folder)
    train(quick(epochs=1, finalize_epoch=None), digits, folder)
    assert (folder / "result.json").exists()


def test_what_a_killed_process_left_is_cleared(digits, tmp_path):
    folder = tmp_path / "run"
    train(quick(epochs=1, finalize_epoch=None), digits, folder)
    (folder / ".checkpoint.pt.123.part").write_bytes(b"half")
    train(quick(epochs=1, finalize_epoch=None), digits, folder, resume=True)
    assert not list(folder.glob(".*.part"))


class _Hostile:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return Path.touch, (self.target,)


def test_a_hostile_checkpoint_is_refused_and_not_executed(digits, tmp_path):
    folder, proof = tmp_path / "run", tmp_path / "executed"
    folder.mkdir()
    torch.save({"recipe": _Hostile(proof)}, folder / "checkpoint.pt")
    with pytest.raises(RunError, match="cannot be read"):
        train(quick(), digits, folder, resume=True)
    assert not proof.exists()
