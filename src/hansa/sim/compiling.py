"""Compile a traced step of a stack for a GPU, by PyTorch's compiler."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("hansa")


def compiled(graph: torch.fx.GraphModule, complaints: set[str]) -> Callable[..., Any]:
    """Compile a traced step. If the compiler fails, log the reason once and run the step as it was traced.

    Each step is tried separately, so that the choice does not depend on earlier training.
    """
    # The compiler may assume other strides for a concatenation than the GPU has, so that a view fails.
    for node in graph.graph.nodes:
        if node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default
    graph.recompile()
    run: Callable[..., Any] = torch.compile(graph, fullgraph=True, dynamic=False)

    def step(*leaves: Tensor) -> Any:
        nonlocal run
        try:
            return run(*leaves)
        except Exception as error:
            if run is graph:
                raise
            reason = compiler_reason(error)
            if reason not in complaints:
                complaints.add(reason)
                log.warning("the compiler failed (%s); steps are recorded without it", reason)
            run = graph
            return run(*leaves)

    return step


def compiler_reason(error: Exception) -> str:
    """The first informative line of a compiler's error: not "backend='inductor' raised:"."""
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line for line in lines if line and not line.endswith("raised:")), type(error).__name__)[:300]
