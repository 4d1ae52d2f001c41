"""FSDP2: the same laws, with parameters in shards; checkpoints through torch.distributed.checkpoint."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from shallower import Pruner, Residual, count_macs, find_blocks, first_order, flip, save

from .ranks import on_ranks
from .test_data_parallel import OPTIONS, STEPS, WIDTH, batches, network, same


class Layer(nn.Module):
    """Two sums in one module, which stays when one of them leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.up, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix(self.norm(x))
        return x + self.down(torch.tanh(self.up(x)))


def transformer() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, WIDTH), *(Layer() for _ in range(3)), nn.Linear(WIDTH, 3))


NETWORKS = {"blocks": network, "sums": transformer}


class Training:
    """A model on this rank, sharded if there is more than one."""

    def __init__(
        self, kind: str, rank: int, size: int, *, units: bool = True, estimator: Any = first_order
    ) -> None:
        self.rank, self.size, self.estimator = rank, size, estimator
        self.model = NETWORKS[kind]()
        if size > 1:
            mesh = init_device_mesh("cpu", (size,))
            for block in list(self.model)[1:-1] if units else ():
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        example = batches()[0][0][:2]
        blocks = find_blocks(NETWORKS[kind](), example)
        names = [b.name for b in blocks]
        self.pruner = Pruner(self.model, self.optimizer, blocks=names, estimator=estimator, **OPTIONS)
        self.draws: list[list[bool]] = []

    def run(self, begin: int, end: int) -> None:
        for step, (inputs, labels) in list(enumerate(batches()))[begin:end]:
            if step == STEPS - 10:
                self.pruner.finalize()
            x, y = inputs.chunk(self.size)[self.rank], labels.chunk(self.size)[self.rank]
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            self.draws.append([gate.xi for gate in self.pruner.gates.values()])
            self.optimizer.step()
            exact = self.estimator is flip
            self.pruner.step((lambda x=x, y=y: F.cross_entropy(self.model(x), y)) if exact else None)

    def save(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        if self.rank == 0:
            torch.save(self.pruner.state_dict(), folder / "pruner.pt")

    def load(self, folder: Path) -> None:
        self.pruner.load_state_dict(torch.load(folder / "pruner.pt", weights_only=True))  # first: it removes
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=model, optim_state_dict=state["optimizer"]
        )

    def found(self) -> dict[str, Any]:
        whole = {n: getattr(p, "full_tensor", lambda p=p: p)() for n, p in self.model.named_parameters()}
        return {
            "theta": self.pruner.theta.numpy(),
            "draws": self.draws,
            "events": [(e.step, e.block) for e in self.pruner.events],
            "weights": {name: p.detach().numpy() for name, p in whole.items()},
            "groups": sorted(grouped(self.model)) if self.size > 1 else None,
            "states": len(self.model._get_fsdp_state()._state_ctx.all_states) if self.size > 1 else None,
        }


def grouped(model: nn.Module) -> list[int]:
    """The sizes of all parameters that are gathered together."""
    states = model._get_fsdp_state()._state_ctx.all_states
    groups = [group for state in states for group in state._fsdp_param_groups]
    return [p.sharded_param.numel() for group in groups for p in group.fsdp_params]


def everything(rank: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in NETWORKS:
        for units in (True, False):
            run = Training(kind, rank, 2, units=units)
            run.run(0, STEPS)
            found[kind, units] = run.found()
    first = Training("blocks", rank, 2)
    first.run(0, 30)
    first.save(folder)
    second = Training("blocks", rank, 2)
    second.load(folder)
    second.run(30, STEPS)
    second.draws = first.draws + second.draws
    found["resumed"] = second.found()
    found["refused"] = refusal()
    exact = Training("blocks", rank, 2, estimator=flip)
    exact.run(0, STEPS)
    found["flip"] = exact.found()
    found["sent"] = sent(rank)
    found["finished"], found["stored"] = finished(rank, folder / "stored")
    found["counted"] = counted(rank)
    return found


def linear_skips() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [Residual(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
    return nn.Sequential(nn.Linear(4, WIDTH), *blocks, nn.Linear(WIDTH, 3))


def finished(rank: int, folder: Path) -> tuple[float, float]:
    """By how much the outputs move when the pruner finishes, and when the network is saved and loaded."""
    model, mesh = linear_skips(), init_device_mesh("cpu", (2,))
    for block in (model[1], model[2]):
        fully_shard(block.branch, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    pruner = Pruner(model, optimizer, **OPTIONS)
    for step, (inputs, labels) in enumerate(batches()[:3]):
        if step == 1:
            pruner.theta[0] = 0.0
        optimizer.zero_grad()
        F.cross_entropy(model(inputs.chunk(2)[rank]), labels.chunk(2)[rank]).backward()
        optimizer.step()
        pruner.step()
    pruner.finalize(0.0)
    model.eval()
    inputs = batches()[0][0]
    with torch.no_grad():
        before = model(inputs)
        model.reshard()  # as after a training step
        net = pruner.finish()
        after = net(inputs)
        save(folder, net, network="linear skips", options={}, removed=[])
        torch.distributed.barrier()
        state = load_file(folder / "model.safetensors")
        whole = {n: getattr(t, "full_tensor", lambda t=t: t)() for n, t in net.state_dict().items()}
    assert pruner.absorption is not None
    assert "shards of fully_shard" in pruner.absorption.kept["1"]
    moved = max(float((state[n] - t).abs().max()) for n, t in whole.items())
    return float((after - before).abs().max()), moved


def counted(rank: int) -> list[bool]:
    """Whether the first layer has a gradient in steps before some of which the network was counted."""
    run, found = Training("blocks", rank, 2), []
    for step in range(4):
        if step in (0, 2):
            count_macs(run.model, batches()[0][0])
        run.run(step, step + 1)
        found.append(run.optimizer.param_groups[0]["params"][0].grad is not None)
    return found


def sent(rank: int) -> list[tuple[int, int]]:
    """How many blocks were open in a step, and the values that went into reductions of gradients."""
    run = Training("blocks", rank, 2)
    found, numbers, own = [], [0], DefaultReduceScatter.__call__

    def counting(
        self: Any, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **kw: Any
    ) -> Any:
        numbers[0] += input_tensor.numel()
        return own(self, output_tensor, input_tensor, *args, **kw)

    DefaultReduceScatter.__call__ = counting
    try:
        for step in range(8):
            numbers[0] = 0
            run.run(step, step + 1)
            found.append((sum(run.draws[-1]), numbers[0]))
    finally:
        DefaultReduceScatter.__call__ = own
    return found


def refusal() -> dict[str, str]:
    mesh, said = init_device_mesh("cpu", (2,)), {}
    for case in ("part", "no root", "later"):
        model = linear_skips()
        if case != "later":
            fully_shard(model[1], mesh=mesh)
        if case == "part":
            fully_shard(model, mesh=mesh)
        try:
            pruner = Pruner(model, torch.optim.SGD(model.parameters(), lr=0.1), **OPTIONS)
            fully_shard(model[1], mesh=mesh)
            pruner.gates["1"].xi = False
            model(batches()[0][0])
        except (ValueError, RuntimeError) as error:
            said[case] = str(error)
    return said


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: Any) -> list[dict[str, Any]]:
    return on_ranks(2, everything, tmp_path_factory.mktemp("shards"))


@pytest.mark.parametrize("units", [True, False])
@pytest.mark.parametrize("kind", NETWORKS)
def test_shards_on_two_ranks_are_one_process_with_the_whole_batch(ranks: Any, kind: str, units: bool) -> None:
    alone = Training(kind, 0, 1)
    alone.run(0, STEPS)
    assert 0 < len(alone.pruner.events) < len(alone.pruner.names)
    for found in ranks:
        same(alone.found(), found[kind, units])


@pytest.mark.parametrize("units", [True, False])
@pytest.mark.parametrize("kind", NETWORKS)
def test_what_is_removed_leaves_the_groups(ranks: Any, kind: str, units: bool) -> None:
    found = ranks[0][kind, units]
    assert sum(found["groups"]) == sum(value.size for value in found["weights"].values())
    alive = 5 - len(found["events"]) if kind == "blocks" else 3
    assert found["states"] == 1 + alive * units


def test_the_exact_estimator_sees_the_weights_before_the_step_in_shards_too(ranks: Any) -> None:
    alone = Training("blocks", 0, 1, estimator=flip)
    alone.run(0, STEPS)
    assert alone.pruner.events
    for found in ranks:
        same(alone.found(), found["flip"])


def test_a_sharded_checkpoint_resumes_to_the_bit(ranks: Any) -> None:
    for found in ranks:
        whole, resumed = found["blocks", True], found["resumed"]
        assert (whole["theta"] == resumed["theta"]).all()
        assert whole["draws"] == resumed["draws"]
        assert all(np.array_equal(value, resumed["weights"][n]) for n, value in whole["weights"].items())


def test_closed_blocks_send_no_gradients(ranks: Any) -> None:
    block = 2 * (WIDTH * WIDTH + WIDTH)
    fixed = (4 * WIDTH + WIDTH) + (WIDTH * 4 + 4)  # the three rows of the last layer are padded to four
    assert len({opened for opened, _ in ranks[0]["sent"]}) > 2
    for opened, numbers in ranks[0]["sent"]:
        assert numbers == opened * block + fixed


def test_a_shard_of_which_a_part_stays_is_refused(ranks: Any) -> None:
    said = ranks[0]["refused"]
    assert "`fully_shard` was applied to the block '1', of which skip.weight stays" in said["part"]


def test_shards_without_a_root_and_shards_of_a_gated_model_are_refused(ranks: Any) -> None:
    said = ranks[0]["refused"]
    assert "but not to the model itself" in said["no root"]
    assert "was given another class after it was gated" in said["later"]


def test_finishing_and_saving_a_sharded_network_changes_nothing(ranks: Any) -> None:
    for found in ranks:
        assert found["finished"] == found["stored"] == 0.0


def test_counting_a_sharded_network_takes_no_gradient_away(ranks: Any) -> None:
    assert all(found["counted"] == [True] * 4 for found in ranks)
