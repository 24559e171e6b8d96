"""Between organisations: an aggregator and its parties over HTTPS with mutual TLS."""
