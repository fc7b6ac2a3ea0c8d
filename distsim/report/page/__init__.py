"""A page to look at: one file, without references to others, that shows steps and the plans of a search."""

from distsim.report.page.document import PageCase, write_page

__all__ = ["PageCase", "write_page"]
