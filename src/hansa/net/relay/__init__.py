"""A relay: a party to the aggregator above it, an aggregator to the parties behind it."""
