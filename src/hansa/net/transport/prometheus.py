"""Prometheus metrics of an aggregator. No label names a party, job or address, so label sets stay small."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

ROUND_SECONDS = (0.1, 0.3, 1, 3, 10, 30, 60, 180, 600, 1800, 3600, 21600)
COMMIT_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)


class Metrics:
    """The metrics of one aggregator, in a registry of its own: a process may run several."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)

        def count(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"hansa_{name}", text, labels, registry=registry)

        self.requests = count("requests", "Requests answered", "route", "status")
        self.refused = count("refused", "Connections and requests refused because of a limit", "reason")
        self.denied = count("denied", "Requests denied: no certificate, or one without the right", "who")
        self.handshake_failures = count("handshake_failures", "TLS handshakes that failed", "reason")
        self.dropped = count("connections_dropped", "Stalled connections that were dropped", "reason")
        self.bytes_in = count("received_bytes", "Bytes received in requests")
        self.bytes_out = count("sent_bytes", "Bytes sent in response bodies")
        self.replies = count("replies", "Parties' replies, by outcome", "status")
        self.rounds = count("rounds", "Closed rounds, with a new model or empty", "status")
        self.round_seconds = Histogram("hansa_round_seconds", "Seconds from one closed round to the next",
                                       registry=registry, buckets=ROUND_SECONDS)  # fmt: skip
        self.commit_seconds = Histogram("hansa_ledger_commit_seconds", "Seconds of a commit to the ledger",
                                        registry=registry, buckets=COMMIT_SECONDS)  # fmt: skip
        self.connections = Gauge("hansa_open_connections", "Open connections", registry=registry)
        self.held = Gauge("hansa_held_polls", "Polls for work that are held open", registry=registry)
        self.lag = Gauge("hansa_event_loop_lag_seconds", "Delay of the event loop's last wake-up", registry=registry)

    def show(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Register a gauge whose value is computed whenever the metrics are read."""
        Gauge(f"hansa_{name}", text, registry=self.registry).set_function(value)

    def text(self) -> bytes:
        """All metrics in the Prometheus text format."""
        return generate_latest(self.registry)
