"""Numerics: objectives, parameters as one vector, random streams, exact sums."""
