"""The demonstrations behind `make demo` and `make demo-net`."""
