"""Tables: mean and deviation by hand, the paper beside them."""

import json

import pytest

from shallower.reports import histogram_table, markdown_table, read_results, survivors, write_section
from shallower.training import Result


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
