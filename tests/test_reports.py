"""Tables, figures and pages: numbers by hand, the paper beside them, and the page in a real browser."""

import csv
import html
import json
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from shallower import models
from shallower.blocks import find_blocks
from shallower.cli import app
from shallower.files import write_csv
from shallower.graphs import replace
from shallower.ledger import BlockCost, count_macs, count_parameters
from shallower.recipes import recipe
from shallower.reports import (
    FolderError,
    Record,
    figures,
    format_table,
    histogram_table,
    load_run,
    load_runs,
    markdown_table,
    read_results,
    rows_by_label,
    survivors,
    write_section,
)
from shallower.reports.costs import INPUTS, network_cost
from shallower.reports.page import POLICY, write_report
from shallower.reports.table import Row, rows_by_name
from shallower.training import Result
from shallower.worth import Worth

CHROMIUM = "/usr/bin/chromium"


def result(seed: int, accuracy: float, kept: list[str], name: str = "mnist-fc10") -> Result:
    return Result(
        recipe=name,
        seed=seed,
        test_accuracy=accuracy,
        test_loss=0.1,
        test_rmse=None,
        layers=1 + len(kept),
        blocks=9,
        blocks_kept=len(kept),
        survivors=kept,
        params=50,
        params_dense=100,
        params_absorbed=50,
        macs=40,
        macs_dense=100,
        macs_absorbed=40,
        ppr=50.0,
        fpr=60.0,
        training_macs_ratio=0.5,
        training_load_ratio=0.6,
        seconds=120.0,
        seconds_spent={},
        versions={},
    )


def test_a_row_is_mean_and_deviation_beside_the_paper():
    runs = [result(0, 98.0, ["blocks.0"]), result(1, 99.0, ["blocks.0", "blocks.1"])]
    last = markdown_table(runs).splitlines()[-1]
    assert last.split(" | ")[:6] == [
        "| mnist-fc10",
        "2",
        "98.50 ± 0.71",
        "98.27 ± 0.13",
        "2.50 ± 0.71",
        "2.00 ± 0.00",
    ]
    assert last.endswith("| 2.0 |")


def test_rows_stand_in_the_order_of_the_recipes():
    runs = [result(0, 99.0, [], "mnist-cnn10"), result(0, 98.0, [], "mnist-fc50"), result(0, 98.0, [], "zzz")]
    names = [line.split(" | ")[0].strip("| ") for line in markdown_table(runs).splitlines()[2:]]
    assert names == ["mnist-fc50", "mnist-cnn10", "zzz"]


def test_the_histogram_counts_runs_in_which_a_block_survived():
    runs = [result(0, 98.0, ["blocks.0"]), result(1, 99.0, ["blocks.0", "blocks.1"])]
    assert survivors(runs) == {"blocks.0": 2, "blocks.1": 1}


def test_the_histogram_as_a_table_counts_in_natural_order():
    runs = [result(0, 98.0, ["blocks.10", "blocks.9"]), result(1, 99.0, ["blocks.9"])]
    assert histogram_table(runs).splitlines()[-1] == "| mnist-fc10 | 2 | blocks.9: 2, blocks.10: 1 |"


def test_a_section_is_replaced_and_the_rest_stays(tmp_path):
    path = tmp_path / "page.md"
    path.write_text("before\n<!-- mnist -->\nold\n<!-- /mnist -->\nafter\n")
    for _ in range(2):
        write_section(path, "mnist", "new\n")
        assert path.read_text() == "before\n<!-- mnist -->\nnew\n<!-- /mnist -->\nafter\n"
    with pytest.raises(ValueError, match="<!-- other -->"):
        write_section(path, "other", "new\n")


def test_results_are_found_below_a_folder_and_a_strange_file_is_named(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "result.json").write_text(result(0, 98.0, []).model_dump_json())
    (tmp_path / "a" / "seed1.json").write_text(result(1, 98.0, []).model_dump_json())
    assert [r.seed for r in read_results([tmp_path])] == [0, 1]
    (tmp_path / "a" / "seed2.json").write_text(json.dumps({"recipe": "x"}))
    with pytest.raises(ValueError, match=r"seed2\.json is no result"):
        read_results([tmp_path])


# -- tables for papers ------------------------------------------------------------------------------------


def two() -> list[Row]:
    return rows_by_name([result(0, 98.0, ["blocks.0"]), result(1, 99.0, ["blocks.0", "blocks.1"])])


def test_the_table_in_latex():
    lines = format_table(two(), "latex").splitlines()
    assert lines[0] == r"\begin{tabular}{lrrrrrrrrrr}"
    assert lines[2] == (
        r"recipe & seeds & accuracy \% & paper & layers & paper & pPR \% & paper & fPR \% & load & minutes \\"
    )
    assert lines[4] == (
        r"mnist-fc10 & 2 & 98.50 $\pm$ 0.71 & 98.27 $\pm$ 0.13 & 2.50 $\pm$ 0.71 & 2.00 $\pm$ 0.00 "
        r"& 50.00 $\pm$ 0.00 & 47.42 $\pm$ 0.00 & 60.00 $\pm$ 0.00 & 0.50 $\pm$ 0.00 & 2.0 \\"
    )
    assert lines[-1] == r"\end{tabular}"


def test_the_table_in_csv_has_mean_and_deviation_apart():
    (row,) = csv.DictReader(format_table(two(), "csv").splitlines())
    assert (row["recipe"], row["seeds"]) == ("mnist-fc10", "2")
    assert (float(row["accuracy"]), float(row["accuracy_sd"])) == (98.5, pytest.approx(0.5**0.5))
    assert (float(row["minutes"]), float(row["paper_ppr"]), row["rmse"]) == (2.0, 47.42, "")


def test_columns_that_nobody_fills_are_left_out_and_an_unknown_format_lists_those_there_are():
    head = markdown_table([result(0, 98.0, [], "zzz")]).splitlines()[0]
    assert head == "| recipe | seeds | accuracy % | layers | pPR % | fPR % | load | minutes |"
    with pytest.raises(ValueError, match="markdown, latex, csv"):
        format_table(two(), "word")


# -- folders of runs --------------------------------------------------------------------------------------

NAMES = [f"blocks.{k}" for k in range(9)]
DENSE = {"params": 170_410, "macs": 169_400}  # of mnist-fc10; a block has 10,100 parameters and 10,000 MACs


def write_run(
    folder: Path, seed: int = 0, *, epochs: int = 4, removals: int = 3, done: bool = True, **fields
):
    """A run of four epochs of ten steps that removes the last block in epoch 1, the one before in 2, ..."""
    chosen = recipe("mnist-fc10", {"epochs": 4, "finalize_epoch": 4, **fields})
    folder.mkdir(parents=True)
    (folder / "recipe.json").write_text(json.dumps({"seed": seed, **chosen.model_dump()}))
    step, metrics, rates, events, load = 3 * DENSE["macs"], [], [], [], 0
    for epoch in range(epochs):
        gone = min(epoch, removals)
        load += 10 * (step - 30_000 * gone)
        size = {"params": DENSE["params"] - 10_100 * gone, "macs": DENSE["macs"] - 10_000 * gone}
        loads = {"load_dense": 10 * step * (epoch + 1), "load_survivors": load, "load_expected": load / 2}
        scores = {"train_loss": 1.0, "test_loss": 0.5, "test_accuracy": 90.0 + epoch}
        metrics.append({"epoch": epoch, **scores, **size, **loads, "load_ran": load * 0.75})
        alive = {name: 0.0 if k > 8 - gone else 0.9 for k, name in enumerate(NAMES)}
        rates.append({"epoch": epoch, **alive})
        if 0 < epoch <= removals:
            events.append({"step": 10 * epoch + 5, "block": NAMES[9 - epoch], "theta": 0.01})
    write_csv(folder / "metrics.csv", metrics)
    write_csv(folder / "thetas.csv", rates)
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    write_csv(folder / "costs.csv", [asdict(BlockCost(name, 10_100, 10_000, 800, 1e-4)) for name in NAMES])
    if done:
        kept = [name for name in NAMES if name not in {event["block"] for event in events}]
        found = result(seed, 98.0 + seed, kept).model_copy(update=size)
        (folder / "result.json").write_text(found.model_dump_json())
        rows = [asdict(Worth(name, 300.0 - 100 * k, 20.0, 200.0)) for k, name in enumerate(kept)]
        write_csv(folder / "worth.csv", rows)
    return folder


@pytest.fixture
def runs(tmp_path) -> list[Record]:
    for seed in (0, 1):
        write_run(tmp_path / "runs" / f"a{seed}", seed)
    write_run(tmp_path / "runs" / "b", log_gamma=-500.0, removals=1)
    return load_runs([tmp_path / "runs"])[0]


def test_a_folder_is_read_back(runs):
    run = runs[0]
    assert (run.recipe.name, run.seed, run.state) == ("mnist-fc10", 0, "finished")
    assert (run.cost.params, run.cost.macs, run.macs) == (170_410, 169_400, 139_400)
    assert [(block.params, block.macs, block.width) for block in run.cost.blocks] == [
        (10_100, 10_000, 100)
    ] * 9
    assert run.removed == {"blocks.8", "blocks.7", "blocks.6"}
    assert run.steps == 10
    assert run.column("test_accuracy") == [90, 91, 92, 93]
    assert run.column("seconds_data") is None


def test_runs_of_other_settings_are_another_row_without_the_papers_figure(runs):
    rows = rows_by_label(runs)
    assert {row.name: len(row.results) for row in rows} == {
        "mnist-fc10 epochs=4 finalize_epoch=4": 2,
        "mnist-fc10 epochs=4 log_gamma=-500 finalize_epoch=4": 1,
    }
    assert {len(row.results): row.paper.accuracy for row in rows} == {2: 98.27, 1: None}


def test_costs_of_blocks_are_those_of_removing_them():
    """The other road: the whole network with the block, and without it."""
    for name in ("mnist-cnn10", "cifar10-vgg16-dense"):
        chosen = recipe(name)
        net, example = getattr(models, chosen.network)(**chosen.options), torch.zeros(1, *INPUTS[chosen.task])
        block = find_blocks(net)[-1]
        found, whole = network_cost(chosen), (count_parameters(net), count_macs(net, example))
        replace(net, block.name, block.bypass(net.get_submodule(block.name)))
        last = found.blocks[-1]
        assert (found.params, found.macs) == whole
        assert last.macs == whole[1] - count_macs(net, example)
        assert last.params == whole[0] - count_parameters(net)


def test_counting_costs_draws_no_random_number():
    state = torch.get_rng_state()
    network_cost(recipe("mnist-fc10", {"options": {"depth": 7}}))
    assert torch.equal(state, torch.get_rng_state())


def test_a_run_that_goes_on_is_read_as_far_as_it_is(tmp_path):
    run = load_run(write_run(tmp_path / "a", epochs=2, done=False))
    assert (run.state, run.result, run.removed) == ("2 of 4 epochs", None, {"blocks.8"})
    for name in ("metrics.csv", "thetas.csv"):
        (tmp_path / "a" / name).unlink()
    run = load_run(tmp_path / "a")
    assert (run.state, run.removed, run.macs) == ("0 of 4 epochs", set(), 169_400)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("recipe.json", "{", r"recipe\.json cannot be read"),
        ("recipe.json", "[]", r"recipe\.json is no recipe of a run"),
        ("recipe.json", '{"seed": 0, "name": "x"}', r"recipe\.json does not fit .*epochs"),
        ("result.json", '{"recipe": "x"}', r"result\.json does not fit .*survivors"),
        ("metrics.csv", "epoch\n0\n", r"metrics\.csv has no column params, macs"),
        ("metrics.csv", "epoch,params\n0,x\n", r"metrics\.csv cannot be read as a table of numbers"),
        ("events.jsonl", '{"step": 1}\n', r"events\.jsonl cannot be read as removals"),
    ],
)
def test_a_strange_file_is_named_and_its_run_left_out(tmp_path, name, text, message):
    good, bad = write_run(tmp_path / "good"), write_run(tmp_path / "bad")
    (bad / name).write_text(text)
    with pytest.raises(FolderError, match=message):
        load_run(bad)
    found, (wrong,) = load_runs([tmp_path])
    assert [run.folder for run in found] == [good]
    assert re.search(message, wrong)


def test_a_place_without_runs_says_how_to_make_one(tmp_path):
    with pytest.raises(FolderError, match=r"shallower train RECIPE --out"):
        load_runs([tmp_path])
    with pytest.raises(FolderError, match="There is no"):
        load_runs([tmp_path / "x"])


# -- figures and the page ---------------------------------------------------------------------------------


def test_theta_has_a_line_for_each_block_that_ends_where_it_was_removed(runs):
    axes = figures.theta_figure(runs[0]).axes[0]
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert list(lines) == NAMES
    assert lines["blocks.8"] == [[0, 0.1], [1, 0.9], [1.5, 0.01]]
    assert lines["blocks.0"] == [[0, 0.1], [1, 0.9], [2, 0.9], [3, 0.9], [4, 0.9]]
    assert len(axes.collections[0].get_offsets()) == 3


def test_theta_of_a_survivor_jumps_where_pruning_ends(tmp_path):
    run = load_run(write_run(tmp_path / "a", finalize_epoch=3))
    line = figures.theta_figure(run).axes[0].lines[0]
    assert line.get_xydata().tolist() == [[0, 0.1], [1, 0.9], [2, 0.9], [3, 0.9], [3, 1.0], [4, 0.9]]


def test_the_network_has_a_box_for_each_block_before_and_after(runs):
    axes = figures.network_figure(runs[0]).axes[0]
    texts = [text.get_text() for text in axes.texts]
    assert len(axes.patches) == 18
    assert texts.count("removed") == 3
    assert (texts.count("blocks.0"), texts.count("blocks.8")) == (2, 1)
    assert texts[-2:] == ["9 blocks\n169.4k MACs\n170.4k params", "6 blocks\n139.4k MACs\n140.1k params"]


def test_parameters_and_load_end_at_their_share_of_dense(runs):
    lines = figures.parameters_figure(runs).axes[0].lines
    assert [line.get_ydata()[-1] for line in lines] == pytest.approx(
        [100 * (1 - n * 10_100 / 170_410) for n in (3, 3, 1)]
    )
    alone = figures.load_figure([runs[-1]]).axes[0].lines
    assert len(alone) == 4  # dense, survivors, expected, ran
    share = 100 * (1 - 3 * 30_000 / (4 * 3 * DENSE["macs"]))  # one block is gone in three of four epochs
    assert [line.get_ydata()[-1] for line in alone] == pytest.approx([100, share, share / 2, 0.75 * share])
    assert len(figures.load_figure(runs).axes[0].lines) == 1 + 2 * 3


def test_the_worth_has_a_bar_for_each_survivor_that_reaches_its_benefit(runs):
    axes = figures.worth_figure(runs[0]).axes[0]
    assert [bar.get_width() for bar in axes.patches] == [300.0 - 100 * k for k in range(6)]
    earning = [bar.get_facecolor() for bar in axes.patches]
    assert len(set(earning)) == 2
    assert earning[0] != earning[1] == earning[2]  # a benefit equal to the price is not above it
    marks = [line.get_xdata()[0] for line in axes.lines if len(set(line.get_xdata())) == 1]
    assert marks == [200.0] * 6


def test_the_histogram_has_a_bar_for_each_block_and_the_front_a_point_for_each_run(runs):
    panels = figures.survivors_figure(runs).axes
    heights = [[bar.get_height() for bar in panel.patches] for panel in panels]
    assert heights == [[2] * 6 + [0] * 3, [1] * 8 + [0]]
    (front,) = figures.front_figure(runs).axes
    assert sorted((line.get_xdata()[0], line.get_ydata()[0]) for line in front.lines) == [
        (139_400, 98.0),
        (139_400, 99.0),
        (159_400, 98.0),
    ]


def test_a_run_by_several_names_is_one_run(tmp_path, monkeypatch):
    monkeypatch.chdir(write_run(tmp_path / "runs" / "a").parent)
    found, _ = load_runs(["a", tmp_path / "runs", tmp_path / "runs" / ".." / "runs" / "a"])
    assert [str(run.folder) for run in found] == ["a"]


def test_many_settings_with_long_labels_keep_their_axes_their_colours_and_their_stars(tmp_path):
    """Ten prices of a ResNet-56 with as many settings as fit on three lines."""
    more = {"theta": 0.5, "theta_lr": 0.005, "tolerance": 0.02, "threshold": 0.2, "lr": 0.05, "decay": 3.0}
    chosen = [recipe("cifar10-resnet56-250", {**more, "log_gamma": -100.0 * k}) for k in range(1, 11)]
    cost = network_cost(chosen[0])
    names = [block.name for block in cost.blocks]
    done = [
        result(0, 90.0 + k, names[: 2 * k], "cifar10-resnet56-250").model_copy(update={"macs": 10**7 * k})
        for k in range(1, 11)
    ]
    metrics = [{"epoch": 0, "params": cost.params, "macs": cost.macs, "load_dense": 1, "load_survivors": 1}]
    parts: dict[str, Any] = {"metrics": metrics, "thetas": [], "events": [], "costs": [], "worth": []}
    some = [
        Record(Path(str(k)), one, 0, **parts, against_dense={}, result=what)
        for k, (one, what) in enumerate(zip(chosen, done, strict=True))
    ]
    assert len({colour for _, colour in figures._coloured(some)}) == 10
    for draw in (figures.parameters_figure, figures.load_figure, figures.front_figure):
        figure = draw(some)
        box, whole = figure.axes[0].get_window_extent(), figure.bbox
        assert box.width > 0.6 * whole.width
        assert box.height > 100
        legend = figure.axes[0].get_legend().get_window_extent()
        assert legend.x0 >= 0
        assert legend.x1 <= whole.width
        assert legend.y0 >= -5  # its border is not drawn
    printed = [
        recipe(name) for name in ("cifar10-resnet56-250", "cifar10-resnet56-500", "cifar10-vgg16-1200")
    ]
    some += [
        Record(
            Path(one.name),
            one,
            0,
            **parts,
            against_dense={},
            result=what.model_copy(update={"recipe": one.name}),
        )
        for one, what in zip(printed, done, strict=False)
    ]
    stars = [line for line in figures.front_figure(some).axes[0].lines if line.get_marker() == "*"]
    assert len(stars) == 3


def test_the_page_is_whole_and_refers_to_nothing_outside(runs, tmp_path):
    write_report(runs, tmp_path / "out" / "page.html", tmp_path / "figures")
    text = (tmp_path / "out" / "page.html").read_text()
    for section in ("summary", "figures", "runs", "costs", "recipe"):
        assert f'<section id="{section}">' in text
    assert text.count("<svg ") == text.count("</svg>") == 4 + 3 * 4
    assert "<script" not in text
    assert not re.search(r"""(src|href|url)\s*[=(]\s*["']?\s*(https?:)?//""", text)
    assert "@import" not in text
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:url\(|href=")#([\w-]+)', text)) <= set(ids)
    saved = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert len(saved) == 2 * 16
    assert {"front.png", "front.svg", "01-mnist-fc10-seed0-theta.png"} <= set(saved)


def test_names_from_files_cannot_become_part_of_the_page(tmp_path):
    folder = write_run(tmp_path / "a", departs="<script>alert(1)</script>")
    run = load_run(folder)
    write_report([run], tmp_path / "page.html")
    assert "<script" not in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("epochs", [0, 1, 2])
def test_a_run_that_goes_on_has_a_page(tmp_path, epochs):
    run = load_run(write_run(tmp_path / "a", epochs=epochs, done=False))
    write_report([run], tmp_path / "page.html")
    assert f"{epochs} of 4 epochs" in (tmp_path / "page.html").read_text()


def test_report_and_table_as_a_user_types_them(tmp_path):
    write_run(tmp_path / "runs" / "a")
    (write_run(tmp_path / "runs" / "bad") / "result.json").write_text("{}")
    words = [
        "report",
        str(tmp_path / "runs"),
        "--out",
        str(tmp_path / "x.html"),
        "--figures",
        str(tmp_path / "f"),
    ]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0, shown.output
    assert "left out" in shown.stderr
    assert (tmp_path / "x.html").exists()
    assert (tmp_path / "f" / "01-mnist-fc10-seed0-network.svg").exists()
    shown = CliRunner().invoke(app, ["table", str(tmp_path / "runs"), "--format", "csv"])
    assert shown.stdout.splitlines()[1].startswith("mnist-fc10 epochs=4 finalize_epoch=4,1,98.0,,7,,50.0,,")
    (tmp_path / "runs" / "a" / "result.json").unlink()
    shown = CliRunner().invoke(app, ["table", str(tmp_path / "runs" / "a")])
    assert (shown.exit_code, "None of these runs has finished" in shown.stderr) == (2, True)


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    write_run(tmp_path / "a")
    for name in [name for name in sys.modules if name.startswith("shallower.reports.")]:
        if name.endswith((".page", ".figures")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("shallower.reports.figures")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    shown = CliRunner().invoke(app, ["report", str(tmp_path / "a"), "--out", str(tmp_path / "x.html")])
    assert shown.exit_code == 2
    assert 'pip install "shallower[reports]"' in shown.stderr
    assert CliRunner().invoke(app, ["table", str(tmp_path / "a")]).exit_code == 0


LOOK = """<script>
const faults = [], asked = [];
window.onerror = (text) => { faults.push(text) };
document.addEventListener('securitypolicyviolation', (event) => asked.push(event.blockedURI));
window.onload = () => {
  document.querySelectorAll('details').forEach(d => d.open = true);
  const boxes = [...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect());
  document.title = JSON.stringify({faults, asked, window: innerWidth,
    figures: boxes.filter(b => b.width > 200 && b.height > 100).length,
    wide: document.documentElement.scrollWidth});
};
</script>"""
FRAME = """<body><iframe src="page.html" style="width:{}px;height:900px;border:0"></iframe>
<script>onload = () => setTimeout(() => document.title = frames[0].document.title, 500)</script></body>"""
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--allow-file-access-from-files"),
    *("--virtual-time-budget=5000", "--window-size=1400,1000", "--dump-dom"),
]


def browse(folder: Path, width: int) -> dict[str, Any]:
    """What a script added to `page.html` sees of the page as laid out in a frame of `width` pixels."""
    page = folder / "page.html"
    text = page.read_text().replace(POLICY, f"{POLICY}; script-src 'unsafe-inline'")
    page.write_text(text.replace('<link rel="icon"', f'{LOOK}<link rel="icon"'))
    (folder / "frame.html").write_text(FRAME.format(width))
    words = [CHROMIUM, *FLAGS, f"--user-data-dir={folder / 'user'}", f"file://{folder}/frame.html"]
    shown = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True).stdout
    title = re.search(r"<title>(.*?)</title>", shown)
    assert title is not None, shown
    return json.loads(html.unescape(title[1]))


needs_chromium = pytest.mark.skipif(not Path(CHROMIUM).exists(), reason=f"there is no {CHROMIUM}")


@needs_chromium
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_in_a_real_browser(runs, tmp_path, width):
    write_report(runs, tmp_path / "page.html")
    seen = browse(tmp_path, width)
    assert seen.pop("wide") <= width  # nothing sticks out
    assert seen == {"faults": [], "asked": [], "window": width, "figures": 16}


@needs_chromium
def test_the_browser_would_have_noticed(runs, tmp_path):
    """The same page with every fault that the test above looks for."""
    write_report(runs[:1], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    bad = "<img src='http://127.0.0.1:9/x.png'><div style='width:2000px'>x</div><script>nothing()</script>"
    (tmp_path / "page.html").write_text(text.replace("</body>", f"{bad}</body>"))
    seen = browse(tmp_path, 390)
    assert "nothing is not defined" in seen["faults"][0]
    assert seen["asked"] == ["http://127.0.0.1:9/x.png"]
    assert (seen["figures"], seen["wide"] >= 2000) == (5, True)
