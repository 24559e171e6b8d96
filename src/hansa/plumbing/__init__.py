"""Plumbing: errors, codec, files that survive a crash, child processes, loading of functions."""
