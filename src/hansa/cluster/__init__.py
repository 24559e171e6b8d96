"""Simulations on a Ray cluster (the extra `ray`): the engine `ray`, whose parties train in actors on many machines."""
