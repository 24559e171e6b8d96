"""What differential privacy, a bound on updates and a secure sum cover."""

from __future__ import annotations

from typing import Any

from hansa.experiment.rules.rule import Facts, Rule


def _unclipped(f: Facts) -> Any:
    """The form of an algorithm whose parties send more than updates; "" if it has no forms."""
    solver = f.solver
    if f.algorithm.trains and f.algorithm.sums >= 1 and solver is not None and solver.kind == "local":
        return None
    form = getattr(f.algorithm, "form", None)
    return (f" in the form {form!r}" if form else "",)


def _check_channel(f: Facts) -> None:
    f.privacy.secure.check(f.problem)


def _openable(f: Facts) -> Any:
    """The fewest parties whose secure sum can be opened, and what to do, where they are too few."""
    secure, wanted = f.privacy.secure, f.run.min_cohort
    least = secure.least(f.cohort_size)
    return wanted > least and (least, secure.hint_for(wanted, f.cohort_size))


PRIVACY = [
    Rule("A protocol of one's own is the only one", "protocol", lambda f: f.protected,
         "protocol= takes over every sum, so privacy= would have no effect",
         "give the protocol as privacy.secure, or leave one of them out"),
    Rule("A private solver tells no training loss", "private_local", lambda f: f.run.pace.watches,
         "run.pace: {run.pace.name!r} depends on the parties' training loss, which {private_local.name!r} does not "
         "release", "use 'fixed'"),
    Rule("A party whose update is protected limits its weight itself", lambda f: f.run.max_weight is not None,
         lambda f: (f.privacy.secure or f.privacy.dp) and ("privacy.max_weight" if f.privacy.dp is None
         else "privacy.dp.weight_cap"),
         "run.max_weight: the aggregator does not see the weight of a party whose update is protected",
         "set {found}, which each party applies itself"),
    Rule("A private run learns no preparation from plain sums", "sums",
         lambda f: f"the epsilon of {f.private_local.name!r}" if f.private_local else f.privacy.dp
         and "central differential privacy",
         "task.prepare: it computes sums without noise over the parties' data ({sums}), which {found} does not cover",
         "use prepare = 'table' with bounds for numbers and categories for texts, which needs no sums, or leave "
         "task.prepare out"),
    Rule("Central privacy does not cover the choice of a cluster", "privacy.dp", lambda f: f.algorithm.clustered,
         "{algorithm.name}: its parties choose a cluster, and central differential privacy covers neither their "
         "choices nor the sizes of the clusters", "use fedavg or another algorithm that averages updates"),
    Rule("Central privacy needs sums", "privacy.dp", lambda f: f.algorithm.verbs != {"reduce"},
         "{algorithm.name}: central differential privacy adds noise to sums of updates, and {seen.name} needs more "
         "than their sum", "use an algorithm that averages, with the fusion 'mean'"),
    Rule("Central privacy clips updates of a model", "privacy.dp", _unclipped,
         "{algorithm.name}: parties send more than updates of a model{found[0]}, and central differential privacy can "
         "clip only updates", "use an algorithm that averages updates, such as fedavg"),
    Rule("Central privacy needs updates that may be clipped", "privacy.dp", lambda f: f.algorithm.whole_updates,
         "{algorithm.name}: the aggregator adds up the changes of what each party keeps, so what a clip cuts off, and "
         "all noise, would stay in its sum for good", "use ditto or another algorithm that averages updates"),
    Rule("Central privacy covers no numbers beside an update", "privacy.dp",
         lambda f: " and ".join(f.algorithm.numbers),
         "{algorithm.name}: beside the update parties send {found}, which a clip of the update's length does not bound",
         "use fedavg or another algorithm that averages updates"),
    Rule("Central privacy covers no control variates", "privacy.dp", lambda f: len(getattr(f.solver, "sends", ())) > 1,
         "{algorithm.name}: beside the update parties send changes of their control variates; parties keep the exact "
         "values, while the server would get clipped values with noise",
         "use fedavg or another algorithm that averages updates"),
    Rule("Central privacy covers no running statistics", "privacy.dp", lambda f: f.spec.stats or f.spec.counts,
         "the model has running statistics (BatchNorm), which are not part of the update and cannot be clipped",
         "use a model without them, such as one with GroupNorm"),
    Rule("One quantile follows one sum", lambda f: f.privacy.dp and f.privacy.dp.quantile is not None,
         lambda f: f.algorithm.sums > 1,
         "{algorithm.name}: it takes {algorithm.sums} sums per round with unrelated lengths, and quantile can follow "
         "only one of them", "leave out quantile"),
    Rule("Central privacy needs a blind selector", "privacy.dp", lambda f: not f.run.select.blind,
         "run.select: {run.select.name!r} selects parties by their data or their training, which central differential "
         "privacy does not cover", "use 'poisson' or 'uniform'"),
    Rule("Central privacy needs all whom a round asks", "privacy.dp", lambda f: f.run.over_select,
         "run.over_select: a party that replies first keeps another out of the sum, which central differential privacy "
         "does not cover", "leave over_select out"),
    Rule("Central privacy releases no training loss", "privacy.dp", lambda f: f.run.pace.watches,
         "run.pace: {run.pace.name!r} depends on the parties' training loss, which central differential privacy does "
         "not release", "use 'fixed'"),
    Rule("Central privacy covers no evaluations of the parties", "privacy.dp",
         lambda f: f.run.eval_parties and f.party_tests,
         "run.eval_parties: the parties' own evaluations are numbers without noise, which central differential privacy "
         "does not cover", "set run.eval_parties = false"),
    Rule("Parties add noise behind a secure sum", lambda f: f.privacy.dp and f.privacy.dp.noise == "parties",
         lambda f: f.privacy.secure is None,
         "privacy.dp.noise: a party's share of the noise is too small to protect an update in the clear",
         "name a secure sum, as in privacy.secure = 'masking', or let the server add the noise"),
    Rule("A secure sum adds whole numbers", lambda f: f.privacy.dp and f.privacy.dp.mechanism == "float",
         lambda f: f.privacy.secure,
         "privacy.dp.mechanism: a secure sum adds integers, so its arithmetic cannot be 'float'", "leave it out"),
    Rule("Behind a secure sum the parties add the noise", lambda f: f.privacy.dp and f.privacy.dp.noise == "server",
         lambda f: f.privacy.secure,
         "privacy.dp.noise: behind a secure sum the aggregator would see the sum without noise before it adds noise",
         "leave the setting out, and the parties add the noise before their updates are hidden"),
    Rule("A bound is on updates that are summed", "privacy.bound",
         lambda f: not f.algorithm.trains or f.algorithm.verbs != {"reduce"},
         "privacy.bound: parties bound updates that are summed, and {algorithm.name} does something else with the "
         "replies", "leave privacy.bound out (run.max_norm rejects updates that the aggregator sees)"),
    Rule("A bound needs updates that may be cut", "privacy.bound", lambda f: f.algorithm.whole_updates,
         "privacy.bound: {algorithm.name} adds up the changes of what each party keeps, so what a bound cuts off would "
         "be missing from its sum for good", "use ditto or another algorithm that averages updates"),
    Rule("A bound covers no running statistics", "privacy.bound", lambda f: f.spec.stats,
         "privacy.bound: the model has running statistics (BatchNorm), which are not part of the update and cannot be "
         "bounded", "use a model without them, such as one with GroupNorm"),
    Rule("Bounded updates are not looked at", "privacy.bound", lambda f: f.run.select.sees,
         "privacy.bound: the selector {run.select.name!r} needs each update by itself, and bounded updates are only "
         "summed", "use another selector, or run.max_norm"),
    Rule("A secure sum cannot find the largest count", "privacy.secure", lambda f: f.spec.counts,
         "the model counts batches (BatchNorm); the fused model needs the largest count, and a secure sum can only add",
         "use a model without BatchNorm (GroupNorm needs no counters), or no secure sum"),
    Rule("A secure sum is for so many parties",
         lambda f: f.privacy.secure and f.privacy.secure.most, lambda f: f.cohort_size > f.privacy.secure.most,
         "the secure sum {privacy.secure.name!r} is for at most {privacy.secure.most} parties, and a round asks "
         "{cohort_size}", "use 'masking'"),
    Rule("A secure sum can serve the parties", "privacy.secure", _check_channel,
         "each secure sum has its least number of parties"),
    Rule("A secure sum is opened for so many parties", lambda f: f.privacy.secure and f.run.min_cohort > 1, _openable,
         "run.min_cohort is {run.min_cohort}, but a secure sum of {found[0]} of {cohort_size} parties could be opened",
         "{found[1]}"),
    Rule("A secure sum needs a blind selector", "privacy.secure", lambda f: not f.run.select.blind,
         "run.select: {run.select.name!r} depends on what the aggregator learns about single parties (losses, numbers "
         "of samples, speed), which a secure sum hides", "use 'uniform' or 'poisson'"),
    Rule("A secure sum hides the norm of an update", "privacy.secure", lambda f: f.run.max_norm is not None,
         "run.max_norm: the aggregator cannot see the norm of an update that is hidden in a sum",
         "have each party bound its own by privacy.bound"),
    Rule("A secure sum hides the metrics of a party", "privacy.secure",
         lambda f: (f.run.metric or "").startswith("party_") and f.run.metric.split("_")[1],
         "run.metric: {run.metric!r} depends on the metrics of single parties, which a secure sum hides",
         "use {found!r}, the mean over all test samples"),
]  # fmt: skip
