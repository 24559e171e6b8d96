"""What transforms of updates and of models go with."""

from __future__ import annotations

from typing import Any

from hansa.experiment.rules.rule import Facts, Rule
from hansa.plumbing.errors import ConfigError
from hansa.transforms import ByLayer, Transform


def _leaves_out(transform: Transform) -> bool:
    """Whether a large part of an update is neither sent nor kept for the next round."""
    if isinstance(transform, ByLayer):
        return any(_leaves_out(each) for each in transform.transforms)
    return (transform.sparse or transform.name in ("clip", "sign")) and not transform.remembers


def _around(f: Facts) -> Any:
    """Why the transform cannot pack the replies of the local solver."""
    try:
        f.run.compress.around(f.local)
    except ConfigError as error:
        return str(error)
    return None


def _lengthens(f: Facts) -> Any:
    """A transform that may lengthen an update, the length that it exceeds, and the setting that would not hold."""
    setting = ("dp.clip", "dp") if f.privacy.dp is not None else ("bound", "bound")
    return next(((each, *setting) for each in f.packing if each.transform.lengthens), None)


def _unadded(f: Facts) -> Any:
    """A transform whose numbers cannot be added."""
    return next((each for each in f.packing if not each.transform.adds), None)


TRANSFORMS = [
    Rule("Packed models need models that are sent", "run.compress_down",
         lambda f: not f.algorithm.trains or "route" in f.algorithm.verbs,
         "run.compress_down: {algorithm.name} sends no model to the parties", "leave it out"),
    Rule("A packed model is whole", "run.compress_down", lambda f: f.run.compress_down.sparse,
         "run.compress_down: {run.compress_down.name!r} leaves most numbers out, and the parties get whole models, not "
         "updates", "use a quantiser: int8, qsgd or stochastic-rounding"),
    Rule("A party opens one packed model", "run.compress_down", lambda f: f.algorithm.clustered,
         "run.compress_down: {algorithm.name} sends several models in one message, and a party opens one",
         "leave it out"),
    Rule("A packed model has another form", "run.compress_down", lambda f: not f.run.compress_down.packs,
         "run.compress_down: {run.compress_down.name!r} keeps the form of an update", "leave it out"),
    Rule("Packed updates need updates", "run.compress", lambda f: not f.algorithm.trains,
         "run.compress: the parties of {algorithm.name} send no updates of a model", "leave it out"),
    Rule("Updates are packed in one way: the algorithm's", "run.compress", lambda f: f.algorithm.packs,
         "run.compress: {algorithm.name} packs updates in its own way", "leave it out"),
    Rule("Models that parties send each other are not packed", "run.compress", lambda f: "route" in f.algorithm.verbs,
         "run.compress: the parties of {algorithm.name} send whole models to each other, and a transform is made for "
         "updates, which become small", "leave it out"),
    Rule("What is added up for good is sent whole", "packing",
         lambda f: f.algorithm.whole_updates and next((p for p in f.packing if _leaves_out(p.transform)), None),
         "{found.where}: {algorithm.name} adds up the changes of what each party keeps, so what "
         "{found.transform.name!r} cuts off would be missing from its sum for good",
         "leave it out, or use 'error-feedback' or 'int8'"),
    Rule("Updates are packed in one way: the local solver's", "run.compress", lambda f: len(f.packing) > 1,
         "run.compress: the algorithm's local solver packs its updates already", "leave one of them out"),
    Rule("A transform can pack what the local solver sends",
         lambda f: f.run.compress is not None and f.local is not None, _around, "run.compress: {found}"),
    Rule("A transform with a memory needs one model per party", "packing",
         lambda f: f.algorithm.clustered and next((p for p in f.packing if p.transform.remembers), None),
         "{found.where}: {found.transform.name!r} remembers numbers of an update for the next round, in which a party "
         "of {algorithm.name} may train another model", "use a transform without memory, such as 'int8'"),
    Rule("A secure sum adds what is packed", lambda f: f.packing and f.hidden, _unadded,
         "{found.where}: {found.transform.name!r} sends numbers that cannot be added before they are opened, and "
         "{hides} adds them", "use a transform that commutes with sums, such as 'clip', or leave one of them out"),
    Rule("A clip or a bound holds for what is packed", lambda f: f.packing and (f.privacy.dp or f.privacy.bound),
         _lengthens,
         "{found[0].where}: {found[0].transform.name!r} can make an update longer than privacy.{found[1]}, so "
         "privacy.{found[2]} would not hold",
         "use a transform that commutes with sums, such as 'clip', or leave one of them out"),
    Rule("Central privacy adds what is packed", lambda f: f.packing and f.privacy.dp, _unadded,
         "{found.where}: {found.transform.name!r} sends numbers that cannot be added before they are opened, and "
         "privacy.dp clips and adds what is sent",
         "use a transform that commutes with sums, such as 'clip', or leave one of them out"),
    Rule("The aggregator checks a bound on updates that it can read", lambda f: f.packing and f.privacy.bound,
         lambda f: f.packed and f.packed[0],
         "privacy.bound: the aggregator checks the length of each update, which {found.where} = "
         "{found.transform.name!r} may change", "use run.max_norm instead"),
    Rule("The aggregator checks the norm of updates that it can read",
         lambda f: f.packing and f.run.max_norm is not None, lambda f: f.privacy.dp and f.packed and f.packed[0],
         "run.max_norm: with privacy.dp and {found.where} = {found.transform.name!r} the aggregator adds packed "
         "updates and does not see the norm of an update",
         "leave run.max_norm out (privacy.dp.clip bounds each update)"),
]  # fmt: skip
