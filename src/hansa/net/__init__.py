"""Parties outside the aggregator's process."""
