"""What an aggregator counts, for Prometheus: no label names a party, a job or an address, so there are never many."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

ROUND_SECONDS = (0.1, 0.3, 1, 3, 10, 30, 60, 180, 600, 1800, 3600, 21600)
COMMIT_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)


class Metrics:
    """The counters of one aggregator, in a registry of their own: several may live in one process."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)

        def count(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"hansa_{name}", text, labels, registry=registry)

        self.requests = count("requests", "Requests answered", "route", "status")
        self.refused = count(
            "refused", "Connections and requests refused by a limit, before anything was done", "reason"
        )
        self.denied = count("denied", "Requests denied: no certificate, or one that may not do this", "who")
        self.handshake_failures = count("handshake_failures", "TLS handshakes that failed", "reason")
        self.dropped = count("connections_dropped", "Connections cut off because they did not go on", "reason")
        self.bytes_in = count("received_bytes", "Bytes received in requests")
        self.bytes_out = count("sent_bytes", "Bytes sent in bodies of answers")
        self.replies = count("replies", "Parties' answers, by what became of them", "status")
        self.rounds = count("rounds", "Rounds, by whether they were closed with a new model or empty", "status")
        self.round_seconds = Histogram("hansa_round_seconds", "Seconds from one closed round to the next",
                                       registry=registry, buckets=ROUND_SECONDS)  # fmt: skip
        self.commit_seconds = Histogram("hansa_ledger_commit_seconds", "Seconds of a commit to the ledger",
                                        registry=registry, buckets=COMMIT_SECONDS)  # fmt: skip
        self.connections = Gauge("hansa_open_connections", "Connections that are open", registry=registry)
        self.held = Gauge("hansa_held_polls", "Questions for work that are held open", registry=registry)
        self.lag = Gauge("hansa_event_loop_lag_seconds", "How late the event loop last woke up", registry=registry)

    def show(self, name: str, text: str, value: Callable[[], float]) -> None:
        """A number that is looked up whenever the metrics are read."""
        Gauge(f"hansa_{name}", text, registry=self.registry).set_function(value)

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self.registry)
