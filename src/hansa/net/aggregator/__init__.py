"""The aggregator: server, queue of asks, ledger, jobs, and what its live page shows."""
