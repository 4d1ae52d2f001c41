"""Bad input: recipes, checkpoints, structures, data files and models that nobody should give.

    python benchmarks/fuzz.py [CASES]        # 10,000, as many of each kind; needs hypothesis and Pillow

Each case must end in an error of ours that says something, or in a right result; a refused call must leave
the model as it was. Exits with 1 and the smallest case where that does not hold.
"""

import copy
import io
import json
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
from shallower.data.cifar import read_cifar
from shallower.data.folder import FolderBatches, scan
from shallower.data.idx import read_idx_pair
from shallower.data.sources import Damaged, DataError
from shallower.recipes import RECIPES, Recipe, RecipeError, recipe
from shallower.training import CHECKPOINT, RunError, train

QUICK: dict[str, Any] = {
    "epochs": 1,
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


# -- files of a run ---------------------------------------------------------------------------------------


@cache
def finished() -> dict[str, bytes]:
    """The files of a run."""
    with tempfile.TemporaryDirectory() as place:
        train(recipe("digits", QUICK), digits(), Path(place) / "run", worth=False)
        return {path.name: path.read_bytes() for path in (Path(place) / "run").iterdir()}


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
            assert net(torch.zeros(1, 1, 8, 8)).shape == (1, 10)


@given(damage)
def checkpoints(how: tuple[Any, ...]) -> None:
    """A run goes on from a checkpoint, or says that it cannot."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        folder.mkdir()
        (folder / CHECKPOINT).write_bytes(damaged(finished()[CHECKPOINT], how))
        try:
            train(recipe("digits", QUICK), digits(), folder, resume=True, worth=False)
        except (RunError, ValueError, OSError) as error:
            says(error)


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
    kinds = {"half": torch.bfloat16, "double": torch.float64, "complex": torch.complex64}
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
    if kind in ("meta", "complex"):
        return
    first = next(model.parameters())
    x = torch.randn(1 if kind == "one" else 4, width, dtype=first.dtype)
    try:
        for _ in range(2):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x).float(), torch.zeros(len(x), dtype=torch.long)).backward()
            optimizer.step()
            pruner.step()
        pruner.finalize()
        net = pruner.finish()
    except (FloatingPointError, RuntimeError, ValueError) as error:
        says(error)
        return
    assert not any("theta" in name for name, _ in net.named_buffers())
    if kind != "nan":
        assert torch.isfinite(net.eval()(x)).all()


KINDS = (recipes, networks, checkpoints, datasets, pictures, models)


def main() -> None:
    cases = int(sys.argv[1]) if sys.argv[1:] else 10_002
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
