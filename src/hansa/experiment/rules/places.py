"""What exists only in a simulation, or only with parties elsewhere."""

from __future__ import annotations

from hansa.experiment.rules.rule import Facts, Rule
from hansa.metrics.names import MEMBERSHIP

APART = "parties behind different relays have certificates of different authorities, and cannot check each other's"


def _measured(f: Facts) -> bool:
    return f.run.target is not None or f.run.patience is not None or f.run.keep == "best"


PLACES = [
    Rule("A finished job is asked where it is", "algorithm.continues", lambda f: not f.deployed,
         "algorithm.of_job: the job {algorithm.continues!r} is of a federation",
         "ask a simulated network with result.predict(ids=...)"),
    Rule("Replies are kept of deployed jobs", "audit.keep_replies", lambda f: not f.deployed,
         "audit.keep_replies applies to deployed jobs (hansa submit); a simulation can be repeated with the same "
         "replies: leave it out"),
    Rule("Samples are in one place only in a simulation", "task.pooled", lambda f: f.deployed,
         "task.pooled: samples of different parties are in one place only in a simulation"),
    Rule("Membership is measured only in a simulation", lambda f: f.run.metric == MEMBERSHIP, lambda f: f.deployed,
         f"run.metric: {MEMBERSHIP!r} needs the training samples of all parties in one place, and exists only in a "
         "simulation", "choose another metric"),
    Rule("Adversaries exist only in a simulation", "adversary", lambda f: f.deployed,
         "[adversary]: adversaries exist only in a simulation",
         "remove the table from the experiment, or simulate the experiment"),
    Rule("Drift exists only in a simulation", "drift", lambda f: f.deployed,
         "[drift]: drift exists only in a simulation; the data of a deployed party change where they are, and "
         "run.detect notices it: remove the table, or simulate the experiment"),
    Rule("The precision tf32 exists only in a simulation", lambda f: f.run.precision == "tf32", lambda f: f.networked,
         "run.precision: 'tf32' exists only in a simulation", "use 'float32' or 'bf16'"),
    Rule("Metrics by a column list its values across a network",
         lambda f: any(metric.by is not None for metric in f.run.metrics),
         lambda f: f.networked and next( (each for each in f.run.metrics if each.by is not None
         and not each.groups and not each.edges), None),
         "run.metrics: {found.name} by {found.by!r}: parties do not tell the values of a column",
         "list them, as in groups = [0, 1], or edges between them"),
    Rule("Parties behind relays send each other no sealed messages", "relayed",
         lambda f: "route" in f.algorithm.verbs or f.algorithm.data == "columns",
         "{algorithm.name}: its parties send each other sealed messages, and " + APART,
         "leave {relayed} out, or use another algorithm"),
    Rule("Parties behind relays sign no keys for each other", "relayed", lambda f: getattr(f.hidden, "active", False),
         "privacy.secure.active: the parties sign their keys of a secure sum, and " + APART,
         "set active = false, or leave {relayed} out"),
    Rule("Replies behind relays cannot be kept", "audit.keep_replies", lambda f: f.relays,
         "audit.keep_replies: relays pass on sums, so the aggregator does not have the reply of each party",
         "leave it out, or use a federation without [relays]"),
    Rule("What a run stops by is measured", _measured, lambda f: not f.run.eval_parties and not f.central,
         "target, patience and keep need a test set: give the task one, or let the parties evaluate"),
]  # fmt: skip
