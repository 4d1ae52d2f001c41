"""Tables and figures of finished runs."""

from shallower.reports.table import histogram_table, markdown_table, read_results, survivors, write_section

__all__ = ["histogram_table", "markdown_table", "read_results", "survivors", "write_section"]
