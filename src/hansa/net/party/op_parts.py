"""The parts of an op that an ask names: inner ops, transforms, models and functions, as a policy checks them."""

from __future__ import annotations

from collections.abc import Iterator

from hansa.core.op import Op
from hansa.core.plain_data import field_types
from hansa.core.registry import Part
from hansa.core.relay import RECEIVE, SEND
from hansa.core.route_op import RouteOp
from hansa.core.wrapper import unwrap
from hansa.metrics.evaluate import EvaluateMetrics
from hansa.metrics.function import functions
from hansa.net.party.approve_rules import SIGNED, SIGNING
from hansa.transforms import Packed, Transform

PACKED = Packed.name  # the op that applies a transform: the policy names the transform instead


def unsealed(op: Op) -> str | None:
    """Why an ask for an op of a route would send its messages to the aggregator, or None."""
    layers, inner = unwrap(op)
    for outer, part in zip((None, *layers), (*layers, inner), strict=True):
        if isinstance(part, RouteOp) and (outer is None or outer.name not in (SEND, RECEIVE)):
            return f"the op {part.name!r} sends messages to other parties, and the ask does not seal them"
    return None


def metric_functions(op: Part) -> list[str]:
    """The functions of the metrics of an op."""
    return functions(op.metrics) if isinstance(op, EvaluateMetrics) else []


def models_in(op: Part) -> list[str]:
    """The names of the models in the fields of an op."""
    values = [getattr(op, name) for name in field_types(type(op))]
    flat = [part for value in values for part in (value if isinstance(value, tuple) else (value,))]
    return [part.name for part in flat if isinstance(part, Part) and part.kind == "model"]


def signed(op: Op) -> bool:
    """Whether an op is part of a masked sum with signatures."""
    return op.name in SIGNED or (op.name in SIGNING and bool(getattr(op, "active", False)))


def parts(op: Part) -> Iterator[Part]:
    """Yield an op, its inner ops and their transforms, recursively."""
    yield op
    for name in field_types(type(op)):
        inner = getattr(op, name)
        for part in inner if isinstance(inner, tuple) else (inner,):
            if isinstance(part, (Op, Transform)):
                yield from parts(part)
