"""HTML pages, plots, tables, and progress on a terminal or in a notebook."""
