"""The commands: `shallower list | train | reproduce | certify | export | data | inspect | report | table`."""

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from shallower import data, inspection
from shallower import export as exporting
from shallower.integrations.zoo import bring
from shallower.recipes import RECIPES, Recipe, RecipeError, recipe
from shallower.reports import (
    Record,
    check_section,
    format_table,
    histogram_table,
    load_runs,
    markdown_table,
    read_results,
    rows_by_label,
    write_section,
)
from shallower.reports.costs import INPUTS, network_cost
from shallower.reports.live import following
from shallower.reports.table import FORMATS
from shallower.reproduce import kept_at, place, reproduce_all
from shallower.shown import out, show, show_blocks, show_certificate, show_ratios
from shallower.store import load
from shallower.training import (
    CERTIFICATE,
    Interrupted,
    Machine,
    Result,
    Run,
    RunError,
    begun_by,
    certify_run,
    compare,
    launched,
    recipe_of,
    train,
    train_against_dense,
)

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
err = Console(stderr=True)

Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="field=value of the recipe; may be repeated")
]
Epochs = Annotated[
    int | None, typer.Option(min=1, help="the whole recipe in so many epochs, every schedule in proportion")
]
DataDir = Annotated[Path | None, typer.Option(help="where the data lie, or are fetched to")]
Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="folders of runs, or folders of these")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
Bf16 = Annotated[bool, typer.Option(help="bfloat16 autocast")]
Compile = Annotated[bool, typer.Option("--compile", help="torch.compile each kind of block")]
ChannelsLast = Annotated[bool, typer.Option(help="memory format of convolutions")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON, for scripts")]


@contextmanager
def _plain_errors() -> Iterator[None]:
    """What a user can repair ends in one clear line and exit code 2; one that is stopped in 130 or 143."""
    try:
        yield
    except Interrupted as stop:
        err.print(str(stop), highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(stop.exit_code) from stop
    except KeyboardInterrupt as stop:
        err.print("Stopped.", highlight=False)
        raise typer.Exit(130) from stop
    except (RecipeError, RunError, data.DataError, ValueError, OSError, ImportError) as error:
        err.print(f"error: {error}", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(2) from error


def parse_overrides(pairs: list[str] | None) -> dict[str, Any]:
    """`field=value`, the value as JSON if it is JSON (numbers, true, null, lists), else as text."""
    found: dict[str, Any] = {}
    for pair in pairs or []:
        key, equals, value = pair.partition("=")
        if not equals:
            raise RecipeError(f"Found --set {pair!r}; it takes field=value, as in --set log_gamma=-250.")
        try:
            found[key.strip()] = json.loads(value)
        except json.JSONDecodeError:
            found[key.strip()] = value
    return found


def _section(into: str) -> tuple[Path, str]:
    path, colon, section = into.rpartition(":")
    if not colon:
        raise RunError(
            f"Found --into {into!r}; it takes FILE:SECTION, as in --into docs/results.md:mnist-fc."
        )
    check_section(Path(path), section)
    return Path(path), section


def _chosen(name: str, sets: list[str] | None, epochs: int | None) -> Recipe:
    found = recipe(name, parse_overrides(sets))
    return found if epochs is None else found.rescaled(epochs)


@app.command("list")
def list_recipes(as_json: AsJson = False) -> None:
    """The recipes, with the figures of the paper."""
    if as_json:
        print(json.dumps([row.model_dump() for row in RECIPES.values()]))
        return
    names = Column("recipe", no_wrap=True, overflow="fold")  # they are what one types
    table = Table(names, "network", "log gamma", "epochs", "paper %", "layers")
    for row in RECIPES.values():
        price = "dense" if row.log_gamma is None else f"{row.log_gamma:g}"
        network = f"{row.network} {row.options.get('depth', '')}".strip()
        figures = [f"{v:g}" if v is not None else "" for v in (row.paper.accuracy, row.paper.layers)]
        table.add_row(row.name, network, price, str(row.epochs), *figures)
    out.print(table)


@app.command("train")
def train_one(
    name: Annotated[str, typer.Argument(metavar="RECIPE", help="see `shallower list`")],
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1)] = 0,
    set_: Overrides = None,
    epochs: Epochs = None,
    folder: Annotated[
        Path | None, typer.Option("--out", help="default: runs/RECIPE_and_what_is_set/seedN")
    ] = None,
    resume: Annotated[bool, typer.Option(help="go on where the run in the folder stopped")] = False,
    overwrite: Annotated[bool, typer.Option(help="replace the run in the folder")] = False,
    data_dir: DataDir = None,
    device: Device = "auto",
    bf16: Bf16 = False,
    channels_last: ChannelsLast = False,
    compiled: Compile = False,
    threads: Annotated[int | None, typer.Option(min=1, help="of PyTorch on the CPU")] = None,
    against_dense: Annotated[bool, typer.Option(help="train the dense twin in turn, and compare")] = False,
    tensorboard: Annotated[bool, typer.Option(help="curves for TensorBoard in the folder")] = False,
    page: Annotated[
        bool, typer.Option("--report", help="report.html in the folder, anew after every epoch")
    ] = False,
    worth: Annotated[bool, typer.Option(help="measure at the end what each survivor earns")] = True,
    as_json: AsJson = False,
) -> None:
    """Train and prune one network."""
    with _plain_errors():
        if threads is not None:
            torch.set_num_threads(threads)
        chosen = _chosen(name, set_, epochs)
        task = data.load(chosen.task, data_dir)
        target = folder or Path("runs") / place(chosen) / f"seed{seed}"
        options: dict[str, Any] = {"seed": seed, "resume": resume, "overwrite": overwrite, "worth": worth}
        dense: Result | None = None
        with launched(Machine(device, bf16, channels_last, compiled)) as (launch, options["machine"]):
            options["job"] = launch.job
            if launch.restarted:  # by torchrun, after a rank was lost
                options.update(begun_by(target, launch.job))
            speaks = launch.first
            follow = following(target, tensorboard=tensorboard and speaks, report=page and speaks)
            with _progress(chosen, show=speaks and not as_json) as report, follow as note:
                if against_dense:
                    both = train_against_dense(chosen, task, target, report=report, note=note, **options)
                    result, dense = both
                else:
                    result = train(chosen, task, target, report=report, note=note, **options)
        if not launch.first:
            return
        if as_json:
            print(result.model_dump_json() if dense is None else json.dumps(compare(result, dense)))
        else:
            show(result, target)
            if dense is not None:
                show_ratios(compare(result, dense))


@app.command("reproduce")
def reproduce(
    names: Annotated[list[str], typer.Argument(metavar="RECIPE...")],
    seeds: Annotated[int, typer.Option(min=1, help="runs with the seeds 0 to N-1")] = 10,
    jobs: Annotated[int, typer.Option(min=1, help="runs at a time, one thread each")] = 1,
    set_: Overrides = None,
    epochs: Epochs = None,
    runs: Annotated[Path, typer.Option(help="the folders of the runs")] = Path("runs"),
    results: Annotated[Path, typer.Option(help="where each result.json is kept")] = Path("results"),
    into: Annotated[
        str | None, typer.Option(help="FILE:SECTION of a Markdown file to put the table in")
    ] = None,
    data_dir: DataDir = None,
    device: Device = "auto",
    bf16: Bf16 = False,
    channels_last: ChannelsLast = False,
    compiled: Compile = False,
    as_json: AsJson = False,
) -> None:
    """Run recipes over several seeds and print the paper's table; finished runs are not run again."""
    with _plain_errors():
        chosen = [_chosen(name, set_, epochs) for name in dict.fromkeys(names)]
        target = None if into is None else _section(into)
        for task in {row.task for row in chosen}:
            data.load(task, data_dir)
        flags = ["--device", device, *["--bf16"] * bf16, *["--channels-last"] * channels_last]
        flags += ["--compile"] * compiled
        places: dict[str, Any] = {"runs": runs, "results": results, "data_dir": data_dir}
        failed = reproduce_all(chosen, seeds=range(seeds), jobs=jobs, flags=flags, **places)
        kept = [kept_at(results, row, seed) for row in chosen for seed in range(seeds)]
        found = read_results(file for file in kept if file.exists())
        print(json.dumps([r.model_dump() for r in found]) if as_json else markdown_table(found))
        if failed:
            untouched = "" if target is None else f" {target[0]} is as it was."
            raise RunError(
                f"{len(failed)} runs failed: {', '.join(failed)}; each folder has a log.txt.{untouched}"
            )
        if target is not None:
            write_section(*target, f"{markdown_table(found)}\n{histogram_table(found)}")


@app.command("data")
def fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help=", ".join(data.NAMES))], data_dir: DataDir = None
) -> None:
    """Fetch and verify a dataset."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # where it is looked for, and what happens
    with _plain_errors():
        task = data.load(name, data_dir, keep=data_dir is not None)
        out.print(
            f"{name}: {len(task.train):,} training and {len(task.test):,} test samples of {task.input_shape}"
        )


@app.command("inspect")
def inspect(
    name: Annotated[str, typer.Argument(metavar="RECIPE|MODEL")],
    set_: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """The blocks of a recipe's network, or of a model (timm:NAME, torchvision:NAME, transformers:TYPE,
    my.module:build): parameters, MACs, and what can be pruned."""
    with _plain_errors():
        if ":" in name:
            _inspect_model(name, as_json)
            return
        cost = network_cost(recipe(name, parse_overrides(set_)))
        blocks = [{"name": b.name, "params": b.params, "macs": b.macs} for b in cost.blocks]
        if as_json:
            print(json.dumps({"recipe": name, "params": cost.params, "macs": cost.macs, "blocks": blocks}))
            return
        show_blocks(name, cost.params, cost.macs, blocks)
        if RECIPES[name].departs:
            out.print(f"departs from the printed settings: {RECIPES[name].departs}", highlight=False)


def _inspect_model(name: str, as_json: bool) -> None:
    model, example = bring(name)
    try:
        found = inspection.inspect_model(model, example)
    except ValueError as error:
        raise ValueError(
            f"{name}: {error} Name a function that returns the model and such an example: my.module:build."
        ) from error
    if as_json:
        print(json.dumps({"model": name, **inspection.as_json(found)}))
        return
    show_blocks(name, found.params, found.macs, [vars(block) for block in found.blocks])
    for path, reason in found.rejected.items():
        out.print(f"not gated: {path}: {reason}", highlight=False, markup=False, soft_wrap=True)


@app.command("certify")
def certify(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="the folder of a finished run")],
    data_dir: DataDir = None,
    device: Device = "auto",
    steps: Annotated[int, typer.Option(min=0, help="of Lanczos, for the curvature; 0 leaves it out")] = 100,
    samples: Annotated[int, typer.Option(min=1, help="that the curvature is taken on")] = 1024,
    as_json: AsJson = False,
) -> None:
    """Hold a trained network against the paper's optimality conditions; written to certificate.json."""
    with _plain_errors():
        task = data.load(recipe_of(run)[0].task, data_dir)
        found = certify_run(run, task, device=device, steps=steps, samples=samples)
        if as_json:
            print(json.dumps(found.as_dict()))
            return
        show_certificate(found, "test loss" if task.kind == "regression" else "test accuracy, %")
        out.print(f"written to {run / CERTIFICATE}", highlight=False)


@app.command("export")
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="the folder of a finished run")],
    to: Annotated[str, typer.Option(help="onnx, torch or safetensors")] = "onnx",
    path: Annotated[Path | None, typer.Option("--out", help="default: a file in the folder")] = None,
    fold: Annotated[bool, typer.Option("--fold-batchnorm", help="into the convolutions before it")] = False,
) -> None:
    """Write the network of a run for others to run; what is written is compared with the network."""
    with _plain_errors():
        if to not in exporting.FORMS:
            raise ValueError(f"There is no form {to!r}; there are {', '.join(exporting.FORMS)}.")
        net, example = load(run), torch.zeros(1, *INPUTS[_task_of(run)])
        written = exporting.export(net, example, to, path or run / exporting.FORMS[to][0], fold=fold)
        out.print(f"written to {written}", highlight=False)


def _task_of(run: Path) -> str:
    try:
        return str(json.loads((run / "recipe.json").read_text())["task"])
    except (OSError, ValueError, KeyError) as error:
        raise RunError(
            f"{run / 'recipe.json'} does not tell what the network was trained on: {error}"
        ) from error


@app.command("report")
def report(
    places: Runs,
    page: Annotated[Path, typer.Option("--out", help="the page to write")] = Path("report.html"),
    figures: Annotated[Path | None, typer.Option(help="a folder for the figures, as PNG and SVG")] = None,
) -> None:
    """One HTML page about runs, finished or not: what was pruned, what it cost, what it saved."""
    with _plain_errors():
        from shallower.reports.page import write_report  # matplotlib is an extra

        runs = _read(places)
        write_report(runs, page, figures)
        out.print(f"written to {page}", highlight=False)


@app.command("table")
def table(
    places: Runs,
    kind: Annotated[str, typer.Option("--format", help=", ".join(FORMATS))] = "markdown",
) -> None:
    """Finished runs as a table for papers and READMEs: mean ± sd over seeds, beside the paper's figure."""
    with _plain_errors():
        rows = rows_by_label(_read(places))
        if not rows:
            raise RunError("None of these runs has finished; `shallower report` shows how far they are.")
        print(format_table(rows, kind), end="")


def _read(places: list[Path]) -> list[Record]:
    runs, wrong = load_runs(places)
    for text in wrong:
        err.print(f"left out: {text}", highlight=False, markup=False, soft_wrap=True)
    return runs


@contextmanager
def _progress(chosen: Recipe, *, show: bool) -> Iterator[Any]:
    if not show or not sys.stderr.isatty():
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[now]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err) as progress:
        bars: dict[str, TaskID] = {chosen.name: progress.add_task(chosen.name, total=chosen.epochs, now="")}

        def report(run: Run, epoch: int, loss: float) -> None:
            name = chosen.name if run.recipe.dense == chosen.dense else f"{chosen.name}, dense twin"
            if name not in bars:
                bars[name] = progress.add_task(name, total=chosen.epochs, now="")
            done = epoch + run.loader.batch / len(run.loader)
            size = f"blocks {len(run.alive)}  MACs {run.macs:,}"
            now = f"epoch {epoch + 1}/{chosen.epochs}  loss {loss:.4f}  {size}"
            progress.update(bars[name], completed=done, now=now)

        yield report


def main() -> None:
    app()
