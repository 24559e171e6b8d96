"""Fields of the metrics line about single parties, as far as `run.min_cohort` allows them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Any

from torch import Tensor

from hansa.core.ask import Gathered, Reduced
from hansa.core.budget import finite
from hansa.core.federation import Finding, Grouping
from hansa.core.op import Reply
from hansa.core.round_record import LISTED, Record, without_numbers
from hansa.metrics.evaluate import EvaluateMetrics
from hansa.metrics.names import higher_is_better

WORST = 20  # parties that a metrics line lists of more than LISTED
Name = Callable[[int], str]


def refusals(record: Record, least: int, name: Name) -> dict[str, Any]:
    """Parties that did not reply, were rejected or capped, and why; with a min_cohort the reasons have no numbers."""
    out: dict[str, Any] = {}
    for kind, parties in (("missing", record.missing), ("rejected", record.rejected), ("capped", record.capped)):
        if parties:
            out[kind] = {name(p): reason if least == 1 else without_numbers(reason) for p, reason in parties.items()}
    return out


def unused(record: Record, least: int, name: Name) -> dict[str, str]:
    """Parties whose replies are not used, and why."""
    kinds = refusals(record, least, name)
    return {party: reason for kind in kinds if kind != "capped" for party, reason in kinds[kind].items()}


def caught(findings: Sequence[Finding], record: Record, attackers: Set[int]) -> dict[str, float]:
    """How well attackers were found: the share of attackers among the parties excluded or rejected (precision), and the
    share of the attackers that were excluded or rejected (recall)."""
    seen = {*record.fused, *record.rejected, *(p for finding in findings for p in finding.parties)}
    without = {*record.rejected, *(p for finding in findings for p in finding.excluded)}
    right, hostile = len(without & attackers), len(seen & attackers)
    out = {"exclusion_precision": right / len(without)} if without else {}
    return out | ({"exclusion_recall": right / hostile} if hostile else {})


def fused(findings: Sequence[Finding], least: int, name: Name) -> dict[str, Any]:
    """What the fusion found out about single parties, by name; with a min_cohort only which ones it excluded."""
    out: dict[str, Any] = {}
    for finding in findings:
        excluded = [name(p) for p in finding.excluded]
        out = {"rule": finding.rule, "excluded": excluded}
        if least == 1:
            shares = {name(p): share for p, share in zip(finding.parties, finding.shares, strict=True)}
            out = {"rule": finding.rule, "shares": shares, "excluded": excluded}
            if finding.scores is not None:
                scores = zip(finding.parties, finding.scores, strict=True)
                out["scores"] = {name(p): finite(s) for p, s in scores}
    return {"fusion": out} if out else {}


def clusters(grouping: Grouping, name: Name) -> dict[str, Any]:
    """The clusters of a round: their weights, and where they are known their sizes, members, and who moved.

    Up to `LISTED` parties are listed.
    """
    out: dict[str, Any] = {"weights": list(grouping.weights)}
    if grouping.members is None:
        return out
    numbers = list(grouping.members.values())
    out |= {"sizes": [numbers.count(c) for c in range(len(grouping.weights))], "moves": len(grouping.moved)}
    if len(numbers) <= LISTED:
        out["parties"] = {name(party): cluster for party, cluster in grouping.members.items()}
        out["moved"] = {name(party): list(pair) for party, pair in grouping.moved.items()}
    if grouping.kept:
        out["kept"] = {str(cluster): reason for cluster, reason in grouping.kept.items()}
    return out


def with_finite(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics for a JSON record: None in place of NaN and infinite numbers."""
    return {name: finite(value) if isinstance(value, float) else value for name, value in metrics.items()}


def of_parties(answers: Gathered, only: Collection[int]) -> Gathered:
    """The replies of some parties."""
    chosen = [(p, reply) for p, reply in zip(answers.parties, answers.replies, strict=True) if p in only]
    return dataclasses.replace(answers, parties=tuple(p for p, _ in chosen), replies=tuple(r for _, r in chosen))


def over_parties(answers: Gathered, least: int, name: Name) -> dict[str, Any]:
    """The parties' metrics on their own test samples: mean, worst tenth, spread (standard deviation) and variance over
    parties, mean over samples, and each party's own; of many parties, those with the highest loss.

    With a min_cohort, only numbers to which at least `min_cohort` parties contribute.
    """
    out: dict[str, Any] = {}
    for metric in sorted({m for reply in answers.replies for m in reply.metrics}):
        pairs = [(r.metrics[metric], r.weight) for r in answers.replies if metric in r.metrics]
        if len(pairs) < least:
            continue
        values = sorted((v for v, _ in pairs), reverse=not higher_is_better(metric))
        mean = sum(values) / len(values)
        tenth = values[: math.ceil(len(values) / 10)]
        out[f"party_{metric}_mean"] = mean
        if len(tenth) >= least:
            out[f"party_{metric}_worst_tenth"] = sum(tenth) / len(tenth)
        variance = sum((v - mean) * (v - mean) for v in values) / len(values)
        out[f"party_{metric}_spread"], out[f"party_{metric}_variance"] = math.sqrt(variance), variance
        out[metric] = sum(v * n for v, n in pairs) / sum(n for _, n in pairs)
    if least > 1:
        return {**out, "hidden": f"run.min_cohort is {least}, so no party's own metrics are shown"}
    own = list(zip(answers.parties, answers.replies, strict=True))
    if len(own) <= LISTED:
        out["parties"] = {name(party): reply.metrics for party, reply in own}
    else:
        own.sort(key=lambda pair: (-_loss(pair[1]), pair[0]))
        out["worst_parties"] = {name(party): reply.metrics for party, reply in own[:WORST]}
    return out


def losses(measure: EvaluateMetrics | None, answers: Gathered) -> dict[int, float]:
    """The loss of each party on its own test samples; without parties that sent impossible counts."""
    if measure is None:
        return {p: r.metrics["loss"] for p, r in zip(answers.parties, answers.replies, strict=True)
                if "loss" in r.metrics}  # fmt: skip
    if not answers.replies:
        return {}
    counts = measure.stacked(answers.replies)
    numbers = zip(answers.parties, measure.numbers(counts), measure.faults(counts), strict=True)
    return {party: metrics["loss"] for party, metrics, fault in numbers if fault is None and "loss" in metrics}


def summed_counts(measure: EvaluateMetrics, answers: Gathered | Reduced, least: int) -> dict[str, Tensor] | None:
    """The sum of the parties' counts, without impossible ones; None if fewer than `least` parties sent any."""
    if isinstance(answers, Reduced):
        sums = dict(answers.sums)
        return sums if measure.fault(sums) is None else None
    faults = measure.faults(measure.stacked(answers.replies))
    replies = [reply for reply, fault in zip(answers.replies, faults, strict=True) if fault is None]
    if len(replies) < max(1, least):
        return None
    return measure.joined(measure.stacked(replies), [reply.weight for reply in replies])[0]


def counted_over_parties(measure: EvaluateMetrics, answers: Gathered, least: int, name: Name) -> dict[str, Any]:
    """As `over_parties`, for chosen metrics: those of all test samples together follow from the summed counts.

    A reply with impossible counts is left out, and named.
    """
    counts = measure.stacked(answers.replies)
    faults = dict(zip(answers.parties, measure.faults(counts), strict=True))
    if any(faults.values()):
        answers = of_parties(answers, [party for party, why in faults.items() if why is None])
        counts = measure.stacked(answers.replies)
    rejected = {name(party): why if least == 1 else without_numbers(why) for party, why in faults.items() if why}
    out: dict[str, Any] = {"miscounted": rejected} if rejected else {}
    if len(answers.replies) < max(1, least):
        return out | {"unmeasured": f"{len(answers.replies)} parties have sent usable counts"}
    numbers = zip(answers.replies, measure.numbers(counts), strict=True)
    own = [Reply({}, reply.weight, metrics=metrics) for reply, metrics in numbers]
    total, parties = measure.joined(counts, [reply.weight for reply in answers.replies])
    over = over_parties(dataclasses.replace(answers, replies=tuple(own)), least, name)
    means = [metric.key for metric in measure.metrics if metric.scalar]
    kept = {key: value for key, value in over.items() if key not in means}
    return out | kept | measure.results(total, parties, least)


def _loss(reply: Reply) -> float:
    """A party's loss; infinite where it is not a number."""
    loss = reply.metrics.get("loss", 0.0)
    return math.inf if math.isnan(loss) else loss
