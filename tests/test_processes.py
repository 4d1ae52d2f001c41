"""Threads and processes: what is trained here is not disturbed by what is done there."""

import copy
import pickle
import sys
import threading
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from shallower import Ledger, Pruner, Residual
from shallower.aside import no_fast_path

WIDTH = 8
Training = tuple[nn.Sequential, torch.optim.Optimizer, Pruner]


def start(seed: int) -> Training:
    """A small network with its weights drawn from a generator of its own, as threads share PyTorch's."""

    def branch() -> nn.Sequential:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    model = nn.Sequential(nn.Linear(4, WIDTH), *(Residual(branch()) for _ in range(4)), nn.Linear(WIDTH, 3))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=generator))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    options: dict[str, Any] = {"log_gamma": -150.0, "theta": 0.5, "theta_lr": 0.02, "tolerance": 0.05}
    return model, optimizer, Pruner(model, optimizer, dataset_size=1000, seed=seed, **options)


def batches(number: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(16, 4, generator=generator) for _ in range(number)]
    return [(x, (x[:, 0] > 0).long() + (x[:, 1] > 0)) for x in inputs]


def run(training: Training, loader: Any, model: Any = None) -> tuple[Any, ...]:
    """Train, and tell all that came of it."""
    net, optimizer, pruner = training
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy((model or net)(x), y).backward()
        optimizer.step()
        pruner.step()
    return pruner.thetas, pruner.events, [p.tolist() for p in net.parameters()]


@pytest.fixture
def busy_threads():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("busy_threads")
def test_two_pruners_in_two_threads_train_as_each_does_alone() -> None:
    alone = {seed: run(start(seed), batches(120, seed)) for seed in (1, 2)}
    assert all(len(events) > 0 for _, events, _ in alone.values())
    found: dict[int, Any] = {}

    def train(seed: int) -> None:
        found[seed] = run(start(seed), batches(120, seed))

    threads = [threading.Thread(target=train, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == alone


@pytest.mark.usefixtures("busy_threads")
def test_a_training_does_not_notice_that_another_thread_builds_pruners_and_counts() -> None:
    """torch.fx patches nn.Module in every thread while it traces."""
    alone = run(start(1), batches(150, 1))
    done, others, faults = threading.Event(), [], []

    def build() -> None:
        try:
            while not done.is_set() or not others:
                training = start(7)
                Ledger(training[2], torch.randn(4, 4))
                others.append(run(training, batches(3, 7)))
                training[2].finalize()
                training[2].finish()
        except Exception as error:
            faults.append(error)

    training = start(1)
    thread = threading.Thread(target=build)
    thread.start()
    try:
        found = run(training, batches(150, 1))
    finally:
        done.set()
        thread.join()
    assert faults == []
    assert found == alone
    assert all(other == others[0] for other in others)


def test_two_models_pruned_in_turns_by_one_process_do_not_disturb_each_other() -> None:
    alone = [run(start(seed), batches(100, seed)) for seed in (1, 2)]
    trainings = [start(seed) for seed in (1, 2)]
    for pair in zip(batches(100, 1), batches(100, 2), strict=True):
        found = [run(training, [batch]) for training, batch in zip(trainings, pair, strict=True)]
    assert found == alone


@pytest.mark.parametrize("way", [copy.deepcopy, copy.copy, pickle.dumps])
def test_a_pruner_is_not_copied_and_says_how_to_get_another(way: Any) -> None:
    with pytest.raises(TypeError, match=r"hooks on the optimiser.*load the state_dict\(\) of each"):
        way(start(0)[2])


def test_a_copy_of_a_gated_model_trains_on_its_own_and_the_original_does_not_notice() -> None:
    alone = run(start(3), batches(60, 3))
    training = start(3)
    run(training, batches(60, 3)[:20])
    twin = copy.deepcopy(training[0])
    for x, y in batches(5, 9):
        F.cross_entropy(twin(x), y).backward()
    assert run(training, batches(60, 3)[20:]) == alone


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_of_a_data_loader_change_nothing(context: str) -> None:
    x, y = (torch.cat(parts) for parts in zip(*batches(20, 4), strict=True))
    loader = DataLoader(TensorDataset(x, y), batch_size=16, num_workers=1, multiprocessing_context=context)
    assert run(start(4), loader) == run(start(4), batches(20, 4))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo's own
def test_a_compiled_model_gets_the_same_estimates() -> None:
    training = start(5)
    model = torch.compile(training[0], backend="eager")
    assert run(training, batches(60, 5), model)[:2] == run(start(5), batches(60, 5))[:2]


def answer(model: nn.Module, x: Tensor, queue: Any) -> None:
    queue.put(model.eval()(x).tolist())


def learn(model: nn.Module, loader: list[tuple[Tensor, Tensor]]) -> None:
    for x, y in loader:
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad if p.grad is not None else 0.0


def test_a_gated_model_is_sent_to_another_process_and_runs_there_as_here() -> None:
    model = start(6)[0]
    x, context = torch.randn(5, 4), mp.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=answer, args=(model, x, queue))
    child.start()
    found = queue.get(timeout=60)
    child.join()
    assert found == model.eval()(x).tolist()


def test_shared_weights_of_a_gated_model_are_trained_by_another_process_and_pruned_here() -> None:
    training = start(8)
    training[0].share_memory()
    before = [p.clone() for p in training[0].parameters()]
    child = mp.get_context("spawn").Process(target=learn, args=(training[0], batches(5, 8)))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert not all(torch.equal(p, old) for p, old in zip(training[0].parameters(), before, strict=True))
    assert len(run(training, batches(150, 8))[1]) > 0
    assert all(p.is_shared() for p in training[0].parameters())


def test_the_switch_of_pytorchs_encoders_is_as_it_was_after_two_threads_at_a_time():
    """The second would note the switch as the first had set it, and leave it so."""
    first_is_in, may_leave = threading.Event(), threading.Event()

    def first() -> None:
        with no_fast_path():
            first_is_in.set()
            may_leave.wait(0.5)

    def second() -> None:
        first_is_in.wait()
        with no_fast_path():
            may_leave.set()
            one.join(0.5)  # held up by the lock, the first has left before; without it, it leaves now

    one, two = threading.Thread(target=first), threading.Thread(target=second)
    for thread in (one, two):
        thread.start()
    for thread in (one, two):
        thread.join()
    assert torch.backends.mha.get_fastpath_enabled()
