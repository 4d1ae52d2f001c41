"""Two ranks with half of each batch are one process with the whole."""

import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shallower import Pruner, Residual, first_order, flip
from shallower.distributed import DataParallel

from .ranks import on_ranks

WIDTH, BATCH, STEPS = 8, 16, 60
OPTIONS: dict[str, Any] = {
    "dataset_size": 1000,
    "log_gamma": -50,
    "theta": 0.5,
    "theta_lr": 0.03,
    "tolerance": 0.05,
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [
        Residual(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))) for _ in range(5)
    ]
    return nn.Sequential(nn.Linear(4, WIDTH), *blocks, nn.Linear(WIDTH, 3))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(STEPS, BATCH, 4, generator=generator)
    return [(x, (x[:, 0] > 0).long() + (x[:, 1] > 0)) for x in inputs]


def train(
    rank: int, size: int, kind: str = "ours", *, estimator: Any = None, every: int = 1
) -> dict[str, Any]:
    """A run on this rank's part of the data: rates, draws, removals, weights."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    pruner = Pruner(model, optimizer, **OPTIONS, estimator=estimator or first_order)
    net: nn.Module = model
    if size > 1 and kind == "ours":
        net = DataParallel(model, pruner)
    elif size > 1:
        net = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    draws, sent = [], []
    for step, (inputs, labels) in enumerate(batches()):
        if step == STEPS - 10:
            pruner.finalize()
        x, y = inputs.chunk(size)[rank], labels.chunk(size)[rank]
        optimizer.zero_grad()
        parts = list(zip(x.chunk(every), y.chunk(every), strict=True))
        for part, labels_of in parts[:-1]:
            with getattr(net, "no_sync", _nothing)():
                (F.cross_entropy(net(part), labels_of) / every).backward()
        (F.cross_entropy(net(parts[-1][0]), parts[-1][1]) / every).backward()
        draws.append([gate.xi for gate in pruner.gates.values()])
        sent.append(getattr(net, "bytes_reduced", 0))
        optimizer.step()
        pruner.step(None if estimator is None else lambda x=x, y=y: F.cross_entropy(model(x), y))
    return {
        "theta": pruner.theta.numpy(),
        "draws": draws,
        "events": [(e.step, e.block) for e in pruner.events],
        "weights": {n: p.detach().numpy() for n, p in model.named_parameters()},
        "sent": sent,
        "buckets": sum(p.numel() for p in getattr(net, "_module_parameters", [])),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


class _nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["events"] == other["events"]
    assert one["draws"] == other["draws"]
    np.testing.assert_allclose(one["theta"], other["theta"], atol=1e-5)
    assert one["weights"].keys() == other["weights"].keys()
    for name, value in one["weights"].items():
        np.testing.assert_allclose(value, other["weights"][name], atol=1e-5, err_msg=name)


# -- on two ranks, all of it in one start of two processes ---------------------------------------------------


def everything(rank: int) -> dict[str, Any]:
    found = {
        "ours": train(rank, 2),
        "torch's": train(rank, 2, "torch's"),
        "accumulated": train(rank, 2, every=2),
        "flip": train(rank, 2, estimator=flip),
        "refused": refusals(rank) | wrong_weights(rank) | wrong_wrapper(),
        "alone": train_alone(rank),
        "finished": train_on(rank),
        "hooks": hooks(),
        "unused": unused(rank),
        "other states": other_states(rank),
    }
    return found


def refusals(rank: int) -> dict[str, str]:
    """What ranks that are not the same are told."""
    said = {}
    for name, options in {
        "seed": {"seed": rank},
        "theta": {"theta": 0.5 + rank / 10},
        "dataset_size": {"dataset_size": 10 + rank},
    }.items():
        model = network()
        try:
            Pruner(model, torch.optim.SGD(model.parameters(), lr=0.1), **{**OPTIONS, **options})
        except ValueError as error:
            said[name] = str(error)
        assert not any(n.endswith("theta") for n, _ in model.named_buffers())  # nothing was gated
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = Pruner(model, optimizer, **OPTIONS)
    pruner.theta[0] += 1e-12 * rank  # as after a checkpoint of another run
    F.cross_entropy(model(batches()[0][0]), batches()[0][1]).backward()
    optimizer.step()
    try:
        pruner.step()
    except RuntimeError as error:
        said["later"] = str(error)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = Pruner(model, optimizer, **OPTIONS)
    F.cross_entropy(model(batches()[0][0]), batches()[0][1]).backward()
    optimizer.step()
    try:
        pruner.step(learn=rank == 0)  # the one must not wait for what the other does not send
    except RuntimeError as error:
        said["learning"] = str(error)
    return said


def wrong_weights(rank: int) -> dict[str, str]:
    """Ranks that begin with other weights, or whose gradients nobody averages."""
    said = {}
    for name in ("other weights", "no wrapper"):
        model = network()
        if rank and name == "other weights":
            model[1].branch[0].weight.data += 0.01
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        pruner = Pruner(model, optimizer, **OPTIONS)
        try:
            for inputs, labels in batches():
                optimizer.zero_grad()
                F.cross_entropy(model(inputs.chunk(2)[rank]), labels.chunk(2)[rank]).backward()
                optimizer.step()
                pruner.step()
        except RuntimeError as error:
            said[name] = f"step {pruner.num_steps}: {error}"
    return said


def wrong_wrapper() -> dict[str, str]:
    said, model = {}, network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = Pruner(model, optimizer, **OPTIONS, process_group=None)
    try:
        DataParallel(model, pruner)
    except ValueError as error:
        said["group"] = str(error)
    pruner.ranks.waits = True  # as one that was built before init_process_group
    F.cross_entropy(model(batches()[0][0]), batches()[0][1]).backward()
    optimizer.step()
    try:
        pruner.step()
    except RuntimeError as error:
        said["early"] = str(error)
    model = network()
    pruner = Pruner(model, torch.optim.SGD(model.parameters(), lr=0.1), **OPTIONS)
    pruner.num_steps = pruner.vitals.learned = 1
    try:
        pruner.finalize(0.1 + 0.1 * torch.distributed.get_rank())
    except ValueError as error:
        said["threshold"] = str(error)
    try:
        DataParallel(model, pruner).join()
    except NotImplementedError as error:
        said["join"] = str(error)
    return said


def train_on(rank: int) -> list[float]:
    """Linear skips are absorbed by `finish()`, which makes parameters anew; training goes on."""
    torch.manual_seed(0)
    blocks = [Residual(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(3)]
    model = nn.Sequential(nn.Linear(4, WIDTH), *blocks, nn.Linear(WIDTH, 3, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = Pruner(model, optimizer, **OPTIONS)
    ddp = DataParallel(model, pruner)
    for step, (inputs, labels) in enumerate(batches()):
        if step == 5:
            pruner.theta[0] = 0.0
        if step == 10:
            pruner.finalize()
        if step == 15:
            pruner.finish()
            assert pruner.absorption is not None
            assert pruner.absorption.folded
        optimizer.zero_grad()
        F.cross_entropy(ddp(inputs.chunk(2)[rank]), labels.chunk(2)[rank]).backward()
        optimizer.step()
        if step < 15:
            pruner.step()
    return [p.detach().abs().sum().item() for p in model.parameters()]


def hooks() -> tuple[int, int]:
    """How often a hook on the wrapper ran before it was taken off, and in all; a block leaves on the way."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = Pruner(model, optimizer, **OPTIONS)
    ddp, ran = DataParallel(model, pruner), []
    handle = ddp.register_forward_hook(lambda *_: ran.append(1))
    counts = []
    for step, (inputs, labels) in enumerate(batches()[:12]):
        if step == 4:
            pruner.theta[0] = 0.0
        if step == 8:
            counts.append(len(ran))
            handle.remove()
        optimizer.zero_grad()
        F.cross_entropy(ddp(inputs), labels).backward()
        optimizer.step()
        pruner.step()
    return counts[0], len(ran)


def train_alone(rank: int) -> float:
    """A network on each rank, of which the other knows nothing."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = Pruner(model, optimizer, **{**OPTIONS, "seed": rank}, process_group=None)
    for inputs, labels in batches()[: 3 + rank]:  # not even as many steps
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        pruner.step()
    return float(pruner.theta.sum())


class Unused(nn.Module):
    """A layer that no forward pass reads, as in many a user's model."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.spare = network(), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def unused(rank: int) -> int:
    """How many steps a model with an unused layer makes, two of them after it was finalised."""
    model = Unused()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = Pruner(model, optimizer, **OPTIONS)
    ddp = DataParallel(model, pruner, find_unused_parameters=True)
    for step, (inputs, labels) in enumerate(batches()[:5]):
        if step == 3:
            pruner.finalize()
        optimizer.zero_grad()
        F.cross_entropy(ddp(inputs.chunk(2)[rank]), labels.chunk(2)[rank]).backward()
        optimizer.step()
        pruner.step()
    return pruner.num_steps


def other_states(rank: int) -> str:
    """What is said if ranks load states of different steps."""
    states = []
    for number in (0, 1):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        pruner = Pruner(model, optimizer, **OPTIONS, process_group=None)
        for inputs, labels in batches()[: 2 + number]:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            pruner.step()
        states.append(pruner.state_dict())
    model = network()
    pruner = Pruner(model, torch.optim.SGD(model.parameters(), lr=0.1), **OPTIONS)
    try:
        pruner.load_state_dict(states[rank])
    except ValueError as error:
        return str(error)
    return ""


def one_apart(rank: int) -> str:
    """What each of three ranks says if the last begins with other weights."""
    model = network()
    if rank == 2:
        with torch.no_grad():
            model[0].weight.mul_(1.0002)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    pruner = Pruner(model, optimizer, **OPTIONS)
    F.cross_entropy(model(batches()[0][0]), batches()[0][1]).backward()
    optimizer.step()
    try:
        pruner.step()
    except RuntimeError as error:
        return str(error)
    return ""


def test_all_ranks_notice_that_one_has_other_weights() -> None:
    for said in on_ranks(3, one_apart):
        assert "1 of 24 parameters are not the same on all ranks" in said


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return on_ranks(2, everything)


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    found = train(0, 1)
    assert 2 <= len(found["events"]) <= 4  # blocks leave on the way, and some stay
    return found


@pytest.mark.parametrize("kind", ["ours", "torch's", "accumulated"])
def test_two_ranks_with_half_the_batch_each_are_one_process_with_the_whole(
    alone: Any, ranks: list[Any], kind: str
) -> None:
    for found in ranks:
        same(alone, found[kind])


def test_the_exact_estimator_is_averaged_too(ranks: list[Any]) -> None:
    whole = train(0, 1, estimator=flip)
    assert whole["events"]
    for found in ranks:
        same(whole, found["flip"])


def test_ranks_are_the_same_to_the_bit(ranks: list[Any]) -> None:
    for kind in ("ours", "torch's", "accumulated", "flip"):
        one, other = (found[kind] for found in ranks)
        assert (one["theta"] == other["theta"]).all()
        assert all((value == other["weights"][name]).all() for name, value in one["weights"].items())


def test_closed_blocks_send_nothing_and_removed_ones_leave_the_buckets(ranks: list[Any], alone: Any) -> None:
    block = sum(p.numel() for p in network()[1].parameters())
    fixed = sum(p.numel() for p in network().parameters()) - 5 * block
    found = ranks[0]["ours"]
    sent = np.diff([0, *found["sent"]])
    kept = 5 - len(found["events"])
    for draws, sent_now in zip(found["draws"], sent, strict=True):
        number = sum(draws) if draws else kept
        assert sent_now == 4 * (fixed + number * block)
    assert found["buckets"] == found["parameters"] == fixed + kept * block


def test_ranks_that_differ_are_refused_before_anything_changes(ranks: list[Any]) -> None:
    for said in (found["refused"] for found in ranks):
        for name in ("seed", "theta", "dataset_size"):
            assert f"The 2 ranks differ in {name} (rank" in said[name]
        assert "the ranks no longer have the same rates and draws" in said["later"]
        assert "the ranks no longer have the same rates and draws" in said["learning"]


def test_a_pruner_without_a_group_is_alone(ranks: list[Any]) -> None:
    assert ranks[0]["alone"] != ranks[1]["alone"]


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("other weights", "step 0: .* of 24 parameters are not the same on all ranks"),
        ("no wrapper", "step 0: .* are not the same on all ranks.*DataParallel average the gradients"),
        ("group", "averages over 1 ranks, but 2 train the model"),
        ("early", "built before `init_process_group`"),
        ("threshold", "differ in threshold"),
        ("join", "give every rank as many"),
    ],
)
def test_what_would_let_ranks_drift_apart_is_refused(ranks: list[Any], case: str, text: str) -> None:
    for found in ranks:
        assert re.search(text, found["refused"].get(case, ""), re.DOTALL)


def test_ranks_that_load_different_states_are_refused(ranks: list[Any]) -> None:
    for found in ranks:
        assert "The 2 ranks differ in num_steps" in found["other states"]


def test_an_unused_layer_may_stay_unused_after_the_last_gate(ranks: list[Any]) -> None:
    assert [found["unused"] for found in ranks] == [5, 5]


def test_training_goes_on_alike_on_all_ranks_after_finish_has_made_parameters_anew(ranks: list[Any]) -> None:
    assert ranks[0]["finished"] == ranks[1]["finished"]


def test_hooks_on_the_wrapper_outlive_a_removal_and_can_be_taken_off(ranks: list[Any]) -> None:
    assert ranks[0]["hooks"] == (8, 8)
