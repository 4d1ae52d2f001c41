"""Tables and figures of finished runs."""

from shallower.reports.table import markdown_table, read_results

__all__ = ["markdown_table", "read_results"]
