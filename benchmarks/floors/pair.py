"""Two processes that share a round: what the floors of more than one process have in common."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable

import torch
from torch import Tensor
from workload import COHORT, SAMPLES, Laps, cohort

# Adds to the second vector, for each of the parties of a round, the model it trained from the first, times its samples.
Train = Callable[[Tensor, Tensor, int, list[int]], None]


def run(first: Tensor, train: Train, rounds: int) -> Laps:
    """FedAvg from the flat parameters `first`: this process and a forked one train half a cohort each, on one thread.

    They share two vectors, the model and the second process's sum, and a pipe on which each waits for the other.
    """
    torch.set_num_threads(1)
    model, theirs = first.clone().share_memory_(), torch.zeros_like(first).share_memory_()
    mine = torch.zeros_like(first)
    here, there = multiprocessing.Pipe()
    other = multiprocessing.get_context("fork").Process(target=_serve, args=(there, model, theirs, train), daemon=True)
    other.start()
    laps = Laps()
    for round_ in range(rounds + 1):
        here.send(round_)
        train(model, mine.zero_(), round_, cohort(round_)[: COHORT // 2])
        here.recv()
        torch.add(mine, theirs, out=model).div_(SAMPLES * COHORT)
        laps()
    here.send(None)
    other.join()
    return laps


def _serve(pipe: multiprocessing.connection.Connection, model: Tensor, total: Tensor, train: Train) -> None:
    while (round_ := pipe.recv()) is not None:
        train(model, total.zero_(), round_, cohort(round_)[COHORT // 2 :])
        pipe.send(round_)
