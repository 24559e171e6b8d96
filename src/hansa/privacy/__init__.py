"""Differential privacy: what is spent, and what is needed for a promise."""
