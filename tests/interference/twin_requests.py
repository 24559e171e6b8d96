"""Requests that a liar may send: valid ones, changed little by little, mostly within the owner's ranges.

Everything is derived from declarations: fields and their types from the registry, numbers from the owner's ranges,
entries of payloads from what an op declares (`entries`), or else from what its module reads.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import random
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin

import hostile_asks
import torch
from torch import Tensor
from twins import COLOURS, FEATURES, KINDS, LAYOUT, TASK, VARIANTS

from hansa.core.ask import op_config
from hansa.core.fields import Owner, owner_of, stated_types
from hansa.core.plain_data import field_types
from hansa.core.registry import lookup, registered
from hansa.local import DPSGD
from hansa.plumbing import codec

Tree = Any  # nested tables and lists of tensors and single values
PURE = 3  # the first numbers of an op and a floor are valid requests without a change
LADDER = (0.0, 1e-320, 1e-160, 1e-30, 1e-9, 1e-3, 0.1, 0.5, 2.0, 10.0, 1e3, 1e9, 1e30, 1e37, 1e39, 1e60, 1e100, 1e140,
          1e154, 1e160, 1e200, 1e250, 1e300, 1e308)  # fmt: skip
MASKED = ("secure-keys", "secure-shares", "secure-masked", "secure-consistent", "secure-unmask")
PREPARING = ("apply-standardise", "keep-features", "weigh-classes", "standardise-own")
LENGTHS = {"two": 2 * FEATURES + 2, "rare": 8 * FEATURES + 8, "numbers": FEATURES + 1}  # of the model of each kind


@dataclass
class Request:
    """A request to a party whose samples are of a kind; the changed record is of a variant.

    `sum` says how it is asked: "" alone, "masked" within a masked sum of three parties, whose settings are `channel`.
    `again` are further payloads that are asked for in the same sum, or as the next request.
    """

    op: dict[str, Any]
    payload: dict[str, Any]
    kind: str
    variant: str
    task: dict[str, Any]
    preparations: list[dict[str, Any]] = field(default_factory=list)
    sum: str = ""
    channel: dict[str, Any] = field(default_factory=dict)
    uniform: bool = False
    again: list[dict[str, Any]] = field(default_factory=list)

    @property
    def tree(self) -> dict[str, Any]:
        return {"task": {**TASK, **KINDS[self.kind], **self.task}, "preparations": self.preparations}


@functools.cache
def seeds() -> dict[str, list[tuple[dict[str, Any], bytes]]]:
    """Valid requests by the name of each op in them: the op's description, and the payload."""
    found: dict[str, list[tuple[dict[str, Any], bytes]]] = defaultdict(list)
    for seed in hostile_asks.seeds():
        at: Any = seed.op
        while isinstance(at, dict):
            found[at["name"]].append((seed.op, seed.payload))
            at = at.get("inner") or at.get("local")
    return found


@functools.cache
def examples() -> dict[str, list[Any]]:
    """Values of payload entries, by the name of the entry."""
    found: dict[str, list[Any]] = defaultdict(list)
    for group in seeds().values():
        for _, payload in group:
            for name, value in codec.decode(payload).items():
                found[name].append(value)
    return found


@functools.cache
def entries_of(name: str) -> tuple[str, ...]:
    """The payload entries of an op: the declared ones, or else those that its module, or that of a base, reads."""
    kind = "op" if name in registered("op") else "local"
    part = lookup(kind, name)
    declared = getattr(part, "entries", None)
    if isinstance(declared, Mapping):
        return tuple(sorted(map(str, declared)))
    found: set[str] = set()
    for base in part.__mro__:
        if base.__module__.startswith("hansa.") and base.__module__ not in ("hansa.core.op", "hansa.core.registry"):
            text = inspect.getsource(sys.modules[base.__module__])
            for pattern in (r'payload(?:\.get\(|\[)"(\w+)"', r'"(\w+)" (?:not )?in payload', r'sent\(payload, "(\w+)"'):
                found |= set(re.findall(pattern, text))
    return tuple(sorted(found))


def innermost(op: Mapping[str, Any]) -> Mapping[str, Any]:
    while isinstance(op.get("inner"), Mapping):
        op = op["inner"]
    return op


def make(name: str, floor: str, number: int) -> Request:
    """The request of an op, a floor and a number: always the same."""
    r = random.Random(f"{name}/{floor}/{number}")
    group = seeds()[name]
    op, data = group[number % len(group)] if number < PURE else r.choice(group)
    request = Request(op, codec.decode(data), _kind(name, r, number), "", {})
    request.variant = r.choice([one for one in VARIANTS if one != "newclass" or request.kind in ("rare", "numbers")])
    if request.kind in ("table", "rare") and r.random() < 0.3:
        request.variant = "text" if request.kind == "table" else "newclass"
    _fit(request)
    _protect(request, name, floor, r)
    if number >= PURE:
        for _ in range(r.choice((1, 1, 1, 2, 2, 3))):
            _mutate(request, r)
        if r.random() < 0.25:
            other = {**request.payload, "work": {"lr": r.choice((1e-12, 0.2, 1.0))}}
            request.again = [r.choice((request.payload, other, changed(request.payload, r)))]
    return request


def _kind(name: str, r: random.Random, number: int) -> str:
    kind = "op" if name in registered("op") else "local"
    if lookup(kind, name).__module__.startswith("hansa.vertical"):
        return "columns"
    if name.startswith("table-") or name == "apply-table":
        return "table"
    return "two" if number < PURE else r.choice(("two", "two", "two", "rare", "rare", "numbers"))


def _fit(request: Request) -> None:
    """Give the payload a model of the length that the kind of samples needs."""
    length, model = LENGTHS.get(request.kind), request.payload.get("model")
    w = model.get("w") if isinstance(model, dict) else None
    if length is not None and isinstance(w, Tensor) and w.shape == (LENGTHS["two"],) and length != LENGTHS["two"]:
        request.payload["model"] = {**model, "w": w.repeat(length // len(w) + 1)[:length].clone()}


def _protect(request: Request, name: str, floor: str, r: random.Random) -> None:
    """Ask for what the floor requires: a private solver, or a secure sum."""
    op, private = request.op, op_config(DPSGD(
        steps=r.choice((1, 2, 3)), batch=r.choice((None, 8, 1)), sigma=r.choice((0.5, 1.0, 30.0)),
        clip=r.choice((1.0, 1.0, 1e-3, 100.0)), lr=r.choice((0.1, 10.0, 1e3, 1e6))))  # fmt: skip
    if floor == "dp" and r.random() < 0.95:
        request.op = op = with_solver(op, private)
    hides = op["name"].startswith("secure-")
    if op["name"] in MASKED and floor != "secure":
        inner, data = r.choice(seeds()[r.choice(("sgd", "column-moments", "evaluate", "class-counts", "dp-sgd"))])
        inner = innermost(inner) if str(inner["name"]).startswith("secure-") else inner
        request.op, request.payload, request.sum = dict(inner), codec.decode(data), "masked"
        request.payload.pop("secure", None)
        _fit(request)
    elif (floor == "active" and not hides) or (floor != "budget" and not hides and r.random() < 0.1):
        request.sum = "masked"
    elif floor == "secure" and not hides:
        if r.random() < 0.75:
            hidden, data = seeds()["secure-paillier"][0]
            request.payload = {**request.payload, "secure": codec.decode(data)["secure"]}
            request.op = {**hidden, "inner": op, "range": r.choice((16.0, 4096.0, 1e-6, 1e6, 1e20))}
        else:
            request.sum = "masked"
    if request.sum:
        request.uniform = r.random() < 0.7
        wide = r.choice((16.0, 16.0, 4096.0, 1e-6, 2.0**60, 2.0**100))
        request.channel = {"range": wide, "statistics": r.choice((2.0**30, 2.0**30, 1.0, 2.0**60))}


def with_solver(op: dict[str, Any], private: dict[str, Any]) -> dict[str, Any]:
    """An op with a private solver in the places of its solvers."""
    kind = op.get("kind", "op")
    types = field_types(lookup(kind, op["name"]))
    inner = {name: {"kind": _kind_of(types[name]), **value} for name, value in op.items() if isinstance(value, dict)}
    inner = {name: value for name, value in inner.items() if value["kind"] in ("op", "local")}
    if kind == "local" and not inner:
        return private
    return {**op, **{name: with_solver(value, private) for name, value in inner.items()}}


def _mutate(request: Request, r: random.Random) -> None:
    """Change one thing of a request."""
    chance, name = r.random(), str(innermost(request.op).get("name"))
    if chance < 0.30:
        out = changed(request.payload, r)
        request.payload = out if isinstance(out, dict) else request.payload
    elif chance < 0.55:
        request.op = with_field(request.op, r)
    elif chance < 0.70:
        known = entries_of(name) if name in seeds() else ()
        extra = r.choice([each for each in known if each not in request.payload] or known or sorted(examples()))
        values = examples().get(extra, [])
        request.payload = {**request.payload, extra: r.choice([1, 2, 3, 7, 40, *values[:4], *values[-4:]])}
    elif chance < 0.78:
        setting = r.choice(("lr", "lr", "epochs", "steps", "batch"))
        number = r.choice((1e-300, 1e-12, 0.1, 10.0, 1e3, 1e6)) if setting == "lr" else r.choice((1, 2, 3, 5, 10))
        request.payload = {**request.payload, "work": {setting: number}}
    elif chance < 0.88 or (request.kind == "table" and chance < 0.94):
        request.task = {**request.task, **_task_field(request.kind, r)}
    elif chance < 0.94:
        step, data = r.choice(seeds()[r.choice(PREPARING)])
        payload = codec.decode(data)
        request.preparations = [*request.preparations, {"op": step, "payload": changed(payload, r)
                                                        if payload and r.random() < 0.5 else payload}]  # fmt: skip
    elif chance < 0.96 and request.sum:
        request.channel = {**request.channel, r.choice(("range", "statistics")): 10.0 ** r.randint(-11, 29)}
    else:
        choose = hostile_asks.Choices(r.randbytes(200))
        request.payload = {**request.payload, r.choice(sorted(request.payload) or ["x"]): hostile_asks.value(choose)}


def _task_field(kind: str, r: random.Random) -> dict[str, Any]:
    if kind == "table":
        columns = r.choice((["age", "number"], ["city", "number"], ["city", "date"], ["age", "text"], ["city", "text"]))
        words = r.choice((["NA"], list(COLOURS), list(COLOURS), [""]))
        return {"table": {**LAYOUT, "columns": r.choice(([columns], LAYOUT["columns"])), "missing": words}}
    return r.choice((
        {"classes": r.choice((1, 2, 3, 8, None))}, {"classes": None}, {"outputs": r.choice((1, 2, 3, 8))},
        {"dtype": r.choice(("float32", "float16"))}, {"loss": r.choice(("mse", "mae", "bce", "cross_entropy"))},
        {"model": r.choice((None, {"name": "2nn", "hidden": 3}))}, {"seed": r.randint(0, 9)}, {"prepared": True},
        {"header": ["y", *(f"c{k}" for k in range(FEATURES))]}, {"shape": [r.choice((1, FEATURES + 1))]},
        {"party_test": 0.3}, {"weighs": False}, {"bf16": True},
    ))  # fmt: skip


def with_field(op: dict[str, Any], r: random.Random) -> dict[str, Any]:
    """An op with another value of one field, of its type and mostly within the owner's range."""
    kind, name = op.get("kind", "op"), op.get("name")
    try:
        types, stated = field_types(lookup(kind, str(name))), stated_types(lookup(kind, str(name)))
    except Exception:
        return op
    if not types:
        return op
    at = r.choice(sorted(types))
    value, hint = op.get(at), types[at]
    if isinstance(value, dict):
        return {**op, at: with_field(value if "kind" in value else {"kind": _kind_of(hint), **value}, r)}
    return {**op, at: _field_value(value, hint, owner_of(stated[at]), r)}


def _kind_of(hint: Any) -> str:
    return next((each.kind for each in (hint, *get_args(hint)) if hasattr(each, "kind")), "op")


def _field_value(value: Any, hint: Any, owner: Owner | None, r: random.Random) -> Any:
    options = (hint, *get_args(hint))
    words = [word for option in options if get_origin(option) is Literal for word in get_args(option)]
    words += list(get_args(hint)) if get_origin(hint) is Literal else []
    if words:
        return r.choice(words)
    if isinstance(value, bool) or bool in options:
        return not value
    if int in options or float in options:
        if type(None) in options and r.random() < 0.2:
            return None
        low, high = (0, 1000) if owner is None or owner.harmless else (owner.least, owner.most)
        new = near(value if isinstance(value, (int, float)) else 1, low, high, r)
        return float(new) if int not in options else int(min(new, 2**62))
    if isinstance(value, list) and value and isinstance(value[0], (int, float)):
        at = r.randrange(len(value))
        return [*value[:at], near(value[at], 0, 1000, r), *value[at + 1 :]]
    return value


def near(value: float, low: float, high: float, r: random.Random) -> float:
    """A number near another one, or somewhere in a range."""
    if r.random() < 0.1:
        return r.choice((low - 1, high * 2, -1, 0))
    new = r.choice((value * 2, value / 2, value + 1, value - 1, value * 10, value / 10, low, high, 1, 2, 3,
                    math.exp(r.uniform(math.log(max(low, 1e-9)), math.log(max(high, 1e-9))))))  # fmt: skip
    new = min(max(new, low), high)
    return int(new) if isinstance(value, int) else new


def places(tree: Tree, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of the values in a tree, tensors and single ones."""
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from places(value, (*path, name))
    elif isinstance(tree, list):
        for at, value in enumerate(tree):
            yield from places(value, (*path, at))
    else:
        yield path


def at_place(tree: Tree, path: tuple[Any, ...]) -> Any:
    for step in path:
        tree = tree[step]
    return tree


def replaced(tree: Tree, path: tuple[Any, ...], value: Any) -> Tree:
    if not path:
        return value
    at, *rest = path
    if isinstance(tree, Mapping):
        return {**tree, at: replaced(tree[at], tuple(rest), value)}
    return [replaced(each, tuple(rest), value) if place == at else each for place, each in enumerate(tree)]


def changed(tree: Tree, r: random.Random) -> Tree:
    """A tree with another value at one place."""
    every = list(places(tree))
    if not every:
        return tree
    path = r.choice(every)
    value = at_place(tree, path)
    if isinstance(value, Tensor):
        return replaced(tree, path, distorted(value, r))
    if isinstance(value, bool):
        return replaced(tree, path, not value)
    if isinstance(value, (int, float)):
        return replaced(tree, path, near(value, 0, 1000, r))
    return tree


def distorted(tensor: Tensor, r: random.Random) -> Tensor:
    """A tensor with other numbers, mostly of the same shape and type."""
    if not tensor.numel() or r.random() < 0.08:
        return hostile_asks.distorted(tensor, hostile_asks.Choices(r.randbytes(20)))
    out = tensor.clone()
    at = r.randrange(out.numel())
    if tensor.is_floating_point():
        number = r.choice((1, -1)) * min(r.choice(LADDER), torch.finfo(tensor.dtype).max)
        match r.randrange(5):
            case 0:
                return tensor * r.choice(LADDER)
            case 1:
                return torch.full_like(tensor, number)
            case 2:
                draws = torch.Generator().manual_seed(r.randrange(2**31))
                drawn = torch.randn(tensor.shape, generator=draws, dtype=torch.float64)
                return (drawn * r.choice(LADDER)).to(tensor.dtype)
            case _:
                out.view(-1)[at] = number
                return out
    if tensor.dtype == torch.bool:
        out.view(-1)[at] = not out.view(-1)[at]
    elif r.random() < 0.2 and tensor.dim():
        return torch.cat([tensor, tensor[:1]])
    elif r.random() < 0.1 and tensor.dim():
        return tensor.flip(0)
    else:
        whole = int(out.view(-1)[at]) + r.choice((1, -1)) if r.random() < 0.6 else r.choice((0, 1, 2, 3, 5, 7, 100))
        out.view(-1)[at] = max(0, min(whole, torch.iinfo(out.dtype).max))
    return out


def brief(tree: Tree) -> Tree:
    """A tree in which tensors are told by their type, shape and largest number."""
    if isinstance(tree, Tensor):
        most = float(tree.double().abs().max()) if tree.numel() else 0.0
        return f"<{str(tree.dtype)[6:]}{list(tree.shape)} up to {most:.3g}>"
    if isinstance(tree, Mapping):
        return {name: brief(value) for name, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [brief(value) for value in tree][:8]
    return brief(dataclasses.asdict(tree)) if dataclasses.is_dataclass(tree) and not isinstance(tree, type) else tree
