"""Tables, figures and pages of runs. `figures` and `page` need matplotlib: import them by name."""

from shallower.reports.runs import FolderError, Record, load_run, load_runs
from shallower.reports.table import (
    check_section,
    format_table,
    histogram_table,
    markdown_table,
    read_results,
    rows_by_label,
    survivors,
    write_section,
)

__all__ = [
    "FolderError",
    "Record",
    "check_section",
    "format_table",
    "histogram_table",
    "load_run",
    "load_runs",
    "markdown_table",
    "read_results",
    "rows_by_label",
    "survivors",
    "write_section",
]
