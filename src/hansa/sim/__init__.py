"""The simulation: engines, virtual clock, runtime."""
