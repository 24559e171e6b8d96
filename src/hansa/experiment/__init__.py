"""Experiments: TOML files and tables as checked objects."""
