"""Bad input: recipes, checkpoints, structures, data files and models that nobody should give.

    python benchmarks/fuzz.py [CASES]        # 10,000, as many of each kind; needs hypothesis and Pillow

Each case must end in an error of ours that says something, or in a right result; a refused call must leave
the model as it was. Exits with 1 and the smallest case where that does not hold.
"""

import contextlib
import copy
import io
import json
import math
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import nn

import shallower
from shallower import Pruner, Residual, data
from shallower.cli import parse_overrides
from shallower.data.cifar import read_cifar
from shallower.data.folder import FolderBatches, scan
from shallower.data.idx import read_idx_pair
from shallower.data.sources import Damaged, DataError
from shallower.recipes import RECIPES, Recipe, RecipeError, recipe
from shallower.training import CHECKPOINT, RunError, train

QUICK: dict[str, Any] = {
    "epochs": 2,
    "batch_size": 256,
    "finalize_epoch": None,
    "theta_lr": 0.05,
    "log_gamma": -100.0,
    "options": {"inputs": 64, "width": 4, "depth": 2, "outputs": 10},
}
junk = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 10**6),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
)


def says(error: Exception, *words: str) -> None:
    """An error has a text, with one of `words` in it."""
    if not str(error) or (words and not any(word in str(error) for word in words)):
        raise AssertionError(f"{type(error).__name__} says {str(error)!r}")


# -- recipes ----------------------------------------------------------------------------------------------


@given(
    st.sampled_from([*RECIPES, "", "mnist", "digits "]),
    st.dictionaries(st.sampled_from([*Recipe.model_fields, "x"]), junk, max_size=4),
)
def recipes(name: str, overrides: dict[str, Any]) -> None:
    """A recipe, or a RecipeError; and a recipe that is written down is the same when it is read."""
    try:
        found = recipe(name, overrides)
    except RecipeError as error:
        says(error)
        return
    assert Recipe.model_validate_json(found.model_dump_json()) == found or _has_nan(found)


def _has_nan(found: Recipe) -> bool:
    return "nan" in repr(found) or "inf" in repr(found)


words = st.one_of(st.text(max_size=12), junk.map(repr), junk.map(lambda value: json.dumps(value)))


@given(st.sampled_from([*RECIPES]), st.sampled_from([*Recipe.model_fields, "x", ""]), words)
def commands(name: str, field: str, value: str) -> None:
    """What is typed behind --set gives a recipe, or a RecipeError."""
    try:
        recipe(name, parse_overrides([f"{field}={value}"]))
    except RecipeError as error:
        says(error)


# -- files of a run ---------------------------------------------------------------------------------------


@cache
def finished() -> dict[str, bytes]:
    """The files of a run."""
    with tempfile.TemporaryDirectory() as place:
        train(recipe("digits", QUICK), digits(), Path(place) / "run", worth=False)
        return {path.name: path.read_bytes() for path in (Path(place) / "run").iterdir()}


class Half(Exception):
    """A run is stopped here."""


@cache
def half_way() -> bytes:
    """The checkpoint in the middle of a run, from which it has steps to go."""

    def stop(*_: Any) -> None:
        raise Half

    with tempfile.TemporaryDirectory() as place:
        with contextlib.suppress(Half):
            train(recipe("digits", QUICK), digits(), Path(place) / "run", worth=False, note=stop)
        return (Path(place) / "run" / CHECKPOINT).read_bytes()


INPUT = torch.linspace(-1, 1, 64).view(1, 1, 8, 8)


@cache
def answer() -> torch.Tensor:
    """What the network of the finished run makes of an input."""
    with tempfile.TemporaryDirectory() as place, torch.no_grad():
        for name in ("model.safetensors", "structure.json"):
            (Path(place) / name).write_bytes(finished()[name])
        return shallower.load(place)(INPUT)


@cache
def digits() -> data.Task:
    return data.load("digits")


damage = st.one_of(
    st.tuples(st.just("cut"), st.floats(0, 1)),
    st.tuples(st.just("flip"), st.floats(0, 1), st.integers(1, 255)),
    st.tuples(st.just("insert"), st.floats(0, 1), st.binary(min_size=1, max_size=9)),
    st.tuples(st.just("other"), st.binary(max_size=50)),
)


def damaged(content: bytes, how: tuple[Any, ...]) -> bytes:
    if how[0] == "other":
        return how[1]
    place = int(how[1] * (len(content) - 1))
    if how[0] == "cut":
        return content[:place]
    if how[0] == "flip":
        return content[:place] + bytes([content[place] ^ how[2]]) + content[place + 1 :]
    return content[:place] + how[2] + content[place:]


@given(st.sampled_from(["model.safetensors", "structure.json"]), damage)
def networks(name: str, how: tuple[Any, ...]) -> None:
    """A damaged network is loaded, as a network, or refused."""
    with tempfile.TemporaryDirectory() as place:
        files = {n: finished()[n] for n in ("model.safetensors", "structure.json")}
        for file, content in files.items():
            (Path(place) / file).write_bytes(damaged(content, how) if file == name else content)
        try:
            net = shallower.load(place)
        except (ValueError, OSError) as error:
            says(error)
            return
        with torch.no_grad():
            assert torch.equal(net(INPUT), answer()), "a damaged network was loaded as another"


@given(damage)
def checkpoints(how: tuple[Any, ...]) -> None:
    """A run goes on from a checkpoint, to the end that it has without damage, or says that it cannot."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        folder.mkdir()
        (folder / CHECKPOINT).write_bytes(damaged(half_way(), how))
        try:
            train(recipe("digits", QUICK), digits(), folder, resume=True, worth=False)
        except (RunError, ValueError, OSError) as error:
            says(error)
            return
        weights = (folder / "model.safetensors").read_bytes()
        assert weights == finished()["model.safetensors"], "the run ended in another way"


# -- files that are whole, and hold something else --------------------------------------------------------


class Bomb:
    """A pickle of it writes a file when it is read as one."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")


places = st.lists(st.integers(0, 30), min_size=1, max_size=4)


def exchanged(state: Any, where: list[int], value: Any) -> Any:
    """`state` with something in it, down to some depth, exchanged, or taken away."""
    step, *further = where
    if isinstance(state, dict) and state:
        key = list(state)[step % len(state)]
        if value is Bomb and not further:
            return {k: v for k, v in state.items() if k != key}
        return {**state, key: exchanged(state[key], further, value) if further else value}
    if isinstance(state, list) and state:
        at = step % len(state)
        if value is Bomb and not further:
            return state[:at] + state[at + 1 :]
        return [*state[:at], exchanged(state[at], further, value) if further else value, *state[at + 1 :]]
    return value


values = st.one_of(junk, st.just(Bomb), st.sampled_from([torch.ones(2), torch.full((3,), torch.nan)]))


@given(places, values, st.booleans())
def fields(where: list[int], value: Any, hostile: bool) -> None:
    """A checkpoint in which something else stands is refused by its name, or gone on with; nothing is run."""
    with tempfile.TemporaryDirectory() as place:
        folder, trap = Path(place) / "run", Path(place) / "trap"
        folder.mkdir()
        state = torch.load(io.BytesIO(half_way()), weights_only=True)
        torch.save(
            exchanged(state, where, Bomb(str(trap)) if hostile else value),
            folder / CHECKPOINT,
        )
        try:
            train(recipe("digits", QUICK), digits(), folder, resume=True, worth=False)
        except RunError as error:
            says(error, CHECKPOINT, "In epoch", "training loss")
        assert not trap.exists(), "a pickle was run"


@given(places, values)
def states(where: list[int], value: Any) -> None:
    """A pruner's state in which something else stands is refused, and the model stays as it was."""
    torch.manual_seed(0)
    model = odd_model("plain", 4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    pruner = Pruner(model, optimizer, dataset_size=50, log_gamma=-5.0)
    one_step(model, optimizer, pruner, torch.randn(4, 4))
    parts, rates = [type(m) for m in model.modules()], pruner.thetas
    state = exchanged(pruner.state_dict(), where, value)
    try:
        pruner.load_state_dict(state)
    except ValueError as error:
        says(error, "state")
        assert [type(m) for m in model.modules()] == parts, "a refused call changed the model"
        assert pruner.thetas == rates, "a refused call changed the rates"
        return
    one_step(model, optimizer, pruner, torch.randn(4, 4))
    assert all(math.isfinite(rate) for rate in pruner.thetas.values())


@given(places, st.one_of(junk, st.integers(0, 10**30)))
def structures(where: list[int], value: Any) -> None:
    """A structure in which something else stands gives a network, or is refused."""
    with tempfile.TemporaryDirectory() as place:
        structure = exchanged(json.loads(finished()["structure.json"]), where, value)
        (Path(place) / "model.safetensors").write_bytes(finished()["model.safetensors"])
        (Path(place) / "structure.json").write_text(json.dumps(structure))
        try:
            net = shallower.load(place)
        except ValueError as error:
            says(error, "structure", "options", "weights", "Found")
            return
        with torch.no_grad():
            assert torch.equal(net(INPUT), answer()), "another structure was loaded as this one"


# -- data -------------------------------------------------------------------------------------------------


@given(st.sampled_from(["idx", "cifar10", "cifar100"]), st.integers(0, 3), damage)
def datasets(kind: str, number: int, how: tuple[Any, ...]) -> None:
    """A damaged file of data is read as what it says, or refused by its name."""
    if kind == "idx":
        images = (
            b"\x00\x00\x08\x03" + b"".join(n.to_bytes(4, "big") for n in (number, 2, 2)) + bytes(4 * number)
        )
        labels = b"\x00\x00\x08\x01" + number.to_bytes(4, "big") + bytes(number)
        contents = {"images": damaged(images, how), "labels": labels}
    else:
        classes = (10,) if kind == "cifar10" else (20, 100)
        contents = {"images": damaged(bytes((len(classes) + 3072) * number) or b"\x00", how)}
    try:
        found = (
            read_idx_pair(contents, "images", "labels")
            if kind == "idx"
            else read_cifar(contents, ("images",), classes)
        )
    except Damaged as error:
        says(error, "images", "labels")
        return
    assert len(found.inputs) == len(found.labels)


@cache
def picture(kind: str) -> bytes:
    """A small image file."""
    content = io.BytesIO()
    Image.effect_noise((9, 7), 50).convert("RGB").save(content, kind)
    return content.getvalue()


@given(st.sampled_from(["JPEG", "PNG"]), damage)
def pictures(kind: str, how: tuple[Any, ...]) -> None:
    """A damaged image is an image of the right size, or refused by its path."""
    with tempfile.TemporaryDirectory() as place:
        for name, content in (("a", picture(kind)), ("b", damaged(picture(kind), how))):
            (Path(place) / name).mkdir()
            (Path(place) / name / f"{name}.{kind.lower()}").write_bytes(content)
        loader = FolderBatches(scan(Path(place)), 2, seed=0, size=8, workers=1)
        try:
            ((inputs, labels),) = loader
        except DataError as error:
            says(error, f"b.{kind.lower()}")
            return
        assert inputs.shape == (2, 3, 8, 8)
        assert sorted(labels.tolist()) == [0, 1]


# -- models -----------------------------------------------------------------------------------------------

ODD = (
    "plain",
    "no blocks",
    "shared",
    "tied",
    "frozen",
    "lazy",
    "half",
    "bfloat",
    "double",
    "complex",
    "nan",
    "meta",
    "one",
)


def odd_model(kind: str, width: int, depth: int) -> nn.Module:
    def branch() -> nn.Module:
        return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))

    blocks: list[nn.Module] = [Residual(branch()) for _ in range(depth)]
    if kind == "no blocks":
        blocks = [branch() for _ in range(depth)]
    if kind == "shared":
        blocks = [blocks[0]] * depth
    if kind == "tied":
        for block in blocks:
            block.branch[2].weight = blocks[0].branch[0].weight
    if kind == "lazy":
        blocks = [Residual(nn.LazyLinear(width)) for _ in range(depth)]
    if kind == "one":
        blocks = [
            Residual(nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width))) for _ in range(depth)
        ]
    model = nn.Sequential(nn.Linear(width, width), *blocks, nn.Linear(width, 3))
    if kind == "frozen":
        for p in blocks[0].parameters():
            p.requires_grad_(False)
    if kind == "nan":
        with torch.no_grad():
            next(blocks[0].parameters()).fill_(float("nan"))
    kinds = {"half": torch.float16, "bfloat": torch.bfloat16, "double": torch.float64}
    kinds["complex"] = torch.complex64
    return model.to(kinds[kind]) if kind in kinds else model.to("meta") if kind == "meta" else model


@given(
    st.sampled_from(ODD),
    st.integers(1, 4),
    st.integers(1, 3),
    st.fixed_dictionaries(
        {},
        optional={
            "log_gamma": st.one_of(st.floats(-50, -1), st.floats(), st.none()),
            "dataset_size": st.one_of(st.integers(-1, 100), st.none(), st.floats()),
            "theta": st.floats(-0.5, 1.5),
            "theta_lr": st.one_of(st.floats(0, 0.1), st.floats()),
            "tolerance": st.floats(-0.1, 1.1),
            "blocks": st.one_of(st.lists(st.sampled_from(["1", "2", "9", ""]), max_size=3), st.just("1")),
            "multipliers": st.dictionaries(st.sampled_from(["1", "7"]), st.floats(-1, 3), max_size=2),
        },
    ),
)
def models(kind: str, width: int, depth: int, options: dict[str, Any]) -> None:
    """A pruner that trains, or an error that leaves the model as it was."""
    torch.manual_seed(0)
    model = odd_model(kind, width, depth)
    before = {name: value for name, value in model.state_dict().items()}
    classes = [type(m) for m in model.modules()]
    values = copy.deepcopy(before) if kind not in ("lazy", "meta") else {}
    try:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        pruner = Pruner(model, optimizer, **{"dataset_size": 50, "log_gamma": -5.0, **options})
    except (ValueError, TypeError, RuntimeError) as error:
        says(error)
        assert [type(m) for m in model.modules()] == classes, "a refused call changed the model"
        assert model.state_dict().keys() == before.keys(), "a refused call changed the model"
        for name, value in values.items():
            assert torch.equal(model.state_dict()[name].nan_to_num(), value.nan_to_num())
        return
    step(model, optimizer, pruner, kind, width)


def step(model: nn.Module, optimizer: Any, pruner: Pruner, kind: str, width: int) -> None:
    if kind == "meta":
        return
    assert kind != "complex", "first-order estimates of complex weights"
    first = next(model.parameters())
    x = torch.randn(1 if kind == "one" else 4, width, dtype=first.dtype)
    before = pruner.thetas
    try:
        for _ in range(2):
            one_step(model, optimizer, pruner, x)
        pruner.finalize()
        net = pruner.finish()
    except FloatingPointError as error:  # a loss of nan
        says(error, "At step")
        assert pruner.thetas == before
        return
    except (RuntimeError, ValueError) as error:
        # PyTorch's own word on a batch of one sample, ours on everything else.
        says(error, "more than 1 value per channel", "schedule", "Nothing", "No gradient", "rate")
        return
    assert not any("theta" in name for name, _ in net.named_buffers())
    if kind != "nan":
        assert torch.isfinite(net.eval()(x)).all()


def one_step(model: nn.Module, optimizer: Any, pruner: Pruner, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x).float(), torch.zeros(len(x), dtype=torch.long)).backward()
    optimizer.step()
    pruner.step()


# -- losses and loaders -----------------------------------------------------------------------------------


@given(
    st.sampled_from([float("nan"), float("inf"), -float("inf"), 1.0]), st.integers(0, 6), st.integers(0, 9)
)
def losses(factor: float, when: int, size: int) -> None:
    """A loss that is not finite stops at its step; a loader without a batch, before the first."""
    torch.manual_seed(0)
    model = odd_model("plain", 4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    pruner = Pruner(model, optimizer, dataset_size=50, log_gamma=-5.0)
    inputs, labels = torch.randn(size, 4), torch.zeros(size, dtype=torch.long)
    batches = list(zip(inputs.split(2), labels.split(2), strict=True)) if size else []
    try:
        for step, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y) * (factor if step == when else 1.0)
            loss.backward()
            optimizer.step()
            pruner.step()
        pruner.finalize()
    except FloatingPointError as error:
        says(error, f"At step {when}")
        assert not math.isfinite(factor)
        return
    except RuntimeError as error:
        says(error, "before any pruner.step()")
        assert size == 0
        return
    assert math.isfinite(factor) or when >= len(batches)


KINDS = (
    recipes,
    commands,
    networks,
    structures,
    checkpoints,
    fields,
    states,
    datasets,
    pictures,
    models,
    losses,
)


def main() -> None:
    cases = int(sys.argv[1]) if sys.argv[1:] else 10_000
    torch.set_num_threads(1)
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    for kind in KINDS:
        run = settings(
            max_examples=cases // len(KINDS), deadline=None, database=None, suppress_health_check=slow
        )(kind)
        run()
        print(f"{cases // len(KINDS):6,d}  {kind.__name__}: {kind.__doc__.splitlines()[0]}", flush=True)
    print(json.dumps({"cases": cases // len(KINDS) * len(KINDS), "failures": 0}))


if __name__ == "__main__":
    main()
