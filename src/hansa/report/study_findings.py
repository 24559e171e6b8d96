"""The main results of a study as sentences, generated from its numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from hansa.metrics.measures import measure_of, number, reaches_beyond
from hansa.metrics.statistics import Estimate
from hansa.report.diagnosis import diverged
from hansa.report.plots import shortened, shown
from hansa.report.study_display import StudyDisplay
from hansa.report.study_plots import Look, is_percent, look, title

FEW = 4  # up to this many settings, each has a sentence of its own


class Names:
    """User-defined labels for display: each in one line, and shortened in figures; distinct labels stay distinct."""

    def __init__(self, results: StudyDisplay) -> None:
        self.title = shortened(results.study.name, 80) or "study"
        self.algorithms = dict(zip(results.algorithms, distinct(results.algorithms, 48, shortened), strict=True))
        self.settings = dict(zip(results.settings, distinct(results.settings, 60, shortened), strict=True))
        short = distinct(results.algorithms, 26, shown)
        self.looks: dict[str, Look] = {
            label: look(at, name) for at, (label, name) in enumerate(zip(results.algorithms, short, strict=True))
        }
        self.panels = dict(zip(results.settings, distinct(results.settings, 34, shown), strict=True))


def line(text: str) -> str:
    """Put a sentence or label on one line."""
    return shortened(text, 1000)


def distinct(labels: Sequence[str], most: int, cut: Callable[[str, int], str]) -> list[str]:
    """Shorten labels, and number them if they would be equal."""
    seen: Counter[str] = Counter()
    out = []
    for label in labels:
        short = cut(label, most) or "(no name)"
        seen[short] += 1
        out.append(short if seen[short] == 1 else f"{short} ({seen[short]})")
    return out


def listed(items: Sequence[str], most: int = 6) -> str:
    """Join items for a sentence."""
    if len(items) > most:
        return f"{', '.join(items[:most])} and {len(items) - most} more"
    return " and ".join([*([", ".join(items[:-1])] if len(items) > 1 else []), *items[-1:]])


def value(score: float, metric: str) -> str:
    """Format a metric's value, shares in percent."""
    return f"{100 * score:.2f} %" if is_percent(metric) else number(score)


def findings(results: StudyDisplay, names: Names) -> list[str]:
    """The study in a few paragraphs."""
    paragraphs = [_what(results), " ".join([*_best(results, names), *_tested(results)]), *_baselines(results, names)]
    paragraphs += _target(results, names)
    paragraphs += _lost(results, names)
    skipped = results.study.skipped.items()
    paragraphs += [f"Runs of {names.algorithms.get(name, name)} are left out: {reason}." for name, reason in skipped]
    failed = len(results.failed)
    if failed:
        paragraphs.append(
            f"{failed} of {len(results.outcomes)} runs failed (reasons below) and are excluded from all results."
        )
    return [paragraph for paragraph in paragraphs if paragraph]


def _what(results: StudyDisplay) -> str:
    counts = (
        (len(results.contenders), "algorithm"), (len(results.settings), "setting"),
        (len(results.study.seeds), "seed"), (len(results.outcomes), "run"),
    )  # fmt: skip
    a, s, k, n = (f"{count:,} {word}{'s' * (count != 1)}" for count, word in counts)
    rounds = max((outcome.history[-1]["round"] for outcome in results.outcomes if outcome.history), default=0)
    task = results.study.tree.get("task", {})
    parts = [_part(task.get(kind)) for kind in ("dataset", "model")]
    on = " with ".join(part for part in parts if part)
    long = f", of up to {rounds:,} rounds" if rounds else ""
    a += f" and {len(results.baselines)} baseline{'s' * (len(results.baselines) != 1)}" if results.baselines else ""
    return f"{a}, {s}, {k}: {n}{long}{f', on {on}' if on else ''}."


def _part(part: object) -> str:
    name = part.get("name") if isinstance(part, dict) else part
    return line(str(name)) if name else ""


def _best(results: StudyDisplay, names: Names) -> list[str]:
    """The best algorithm of each setting."""
    first = {setting: order[0] for setting in results.settings if (order := results.order(setting))}
    measure = f"final {title(results.metric).removesuffix(', %')}"
    if not first and len(results.failed) == len(results.outcomes):
        return ["Every run failed, so there is nothing to compare."]
    if not first:
        return [f"No run has a {measure}, so there is nothing to compare."]
    if len(first) > FEW:
        wins = Counter(first.values()).most_common()
        sentences = [f"{names.algorithms[name]} in {count}" for name, count in wins]
        return [f"Best {measure}: {listed(sentences)} of {len(first)} settings."]
    sentences = []
    for setting, best in first.items():
        estimate = results.estimate(f"final_{results.metric}", best, setting)
        where = f" in {names.settings[setting]}" if len(results.settings) > 1 else ""
        if len(results.order(setting)) == 1:
            sentences.append(f"{names.algorithms[best]} ends{where} at {_estimate(estimate, results.metric)}.")
            continue
        result = f"{names.algorithms[best]} has the best {measure}{where}, {_estimate(estimate, results.metric)}"
        sentences.append(f"{result}{_against(results, names, setting)}.")
    return sentences


def _baselines(results: StudyDisplay, names: Names) -> list[str]:
    """How the baselines end, in a study of few settings."""
    if not results.baselines or len(results.settings) > FEW:
        return []
    sentences = []
    for setting in results.settings:
        estimates = {name: results.estimate(f"final_{results.metric}", name, setting) for name in results.baselines}
        ends = [
            f"{names.algorithms[name]} {_estimate(each, results.metric)}" for name, each in estimates.items() if each
        ]
        where = f" in {names.settings[setting]}" if len(results.settings) > 1 else ""
        sentences += [f"Baselines{where}: {listed(ends)}."] if ends else []
    return [" ".join(sentences)] if sentences else []


def _against(results: StudyDisplay, names: Names, setting: str) -> str:
    """Which other algorithms are significantly worse than the best, in the shorter of two wordings."""
    if len(results.study.seeds) < 2:
        return ""
    leaders, order = results.leaders(setting), results.order(setting)
    others = [names.algorithms[name] for name in leaders[1:]]
    worse = [names.algorithms[name] for name in order if name not in leaders]
    if not worse:
        return "; no other is significantly worse"
    if not others:
        return "; all others are significantly worse"
    if len(worse) <= len(others):
        return f"; of the others {listed(worse)} {'is' if len(worse) == 1 else 'are'} significantly worse"
    return f"; {listed(others)} {'is' if len(others) == 1 else 'are'} not significantly worse"


def _lost(results: StudyDisplay, names: Names) -> list[str]:
    """Algorithms with runs that diverged."""
    lost = []
    for name in results.algorithms:
        runs = [outcome for outcome in results.outcomes if outcome.cell.algorithm == name]
        count = sum(diverged(outcome.history) is not None for outcome in runs)
        if count:
            lost.append(f"{names.algorithms[name]} in {count} of {len(runs)}")
    return [f"Runs that diverged (a loss that is not finite, or rose a thousandfold): {listed(lost)}."] if lost else []


def _estimate(estimate: Estimate | None, metric: str) -> str:
    if estimate is None or estimate.mean is None:
        return "no number"
    if estimate.low is None or estimate.high is None:
        return value(estimate.mean, metric)
    half = (estimate.high - estimate.low) / 2
    beyond = reaches_beyond(estimate, measure_of(f"final_{metric}", metric))
    note = " (the interval exceeds the possible values: meaningless, too few seeds)" if beyond else ""
    if is_percent(metric):
        return f"{100 * estimate.mean:.2f} ± {100 * half:.2f} %{note}"
    return f"{number(estimate.mean)} ± {number(half)}{note}"


def _tested(results: StudyDisplay) -> list[str]:
    """The number of significant differences, and the test of the ranks."""
    if len(results.contenders) < 2 or not any(results.order(setting) for setting in results.settings):
        return []
    if len(results.study.seeds) < 2:
        return ["With one seed there are no intervals and no tests: any difference may be due to chance."]
    pairs = [pair for setting in results.settings for pair in results.differences(setting)]
    tested = [pair for pair in pairs if pair.adjusted is not None]
    sentences = []
    if tested:
        count = sum(pair.significant for pair in tested)
        verb = "is" if count == 1 else "are"
        sentences.append(
            f"{count or 'None'} of {len(tested)} pairwise differences {verb} significant (paired t tests, Holm)."
        )
    if len(results.study.seeds) == 2:
        sentences.append("Intervals from two seeds are very wide; use three or more seeds.")
    ranking = results.ranks()
    if ranking.p is not None:
        differ = "differ" if ranking.p < 0.05 else "do not differ"
        over = "settings and seeds" if len(results.settings) > 1 else "seeds"
        sentences.append(f"Over all {over}, the ranks {differ} significantly (Friedman, {p_value(ranking.p)}).")
    return sentences


def p_value(p: float) -> str:
    """Format a p value."""
    return "p < 0.0001" if p < 1e-4 else f"p = {p:.2g}"


def _target(results: StudyDisplay, names: Names) -> list[str]:
    """Algorithms that reached the target, and those that did not."""
    target = results.study.target
    if target is None or not any(results.order(setting) for setting in results.settings):
        return []
    never: dict[str, list[str]] = {}
    partly = []
    for setting in results.settings:
        where = f" in {names.settings[setting]}" if len(results.settings) > 1 else ""
        for name in results.algorithms:
            estimate = results.estimate("rounds_to_target", name, setting)
            if estimate is None or estimate.reached is None:
                continue
            if estimate.reached == 0:
                never.setdefault(where, []).append(names.algorithms[name])
            elif estimate.reached < estimate.n:
                partly.append(f"{names.algorithms[name]}{where} ({estimate.reached} of {estimate.n})")
    goal = f"The target, {title(results.metric).removesuffix(', %')} {value(target, results.metric)},"
    if sum(map(len, never.values())) == len(results.algorithms) * len(results.settings):
        return [f"{goal} was reached by no run."]
    if not never and not partly:
        return [f"{goal} was reached by every run."]
    never_reached = [f"{_by(algorithms, results)}{where}" for where, algorithms in never.items()]
    if len(results.settings) > FEW:
        rows = len(results.algorithms) * len(results.settings)
        count = sum(map(len, never.values()))
        return [
            f"{goal} was never reached in {count} of {rows} rows of the table, only with some seeds in {len(partly)}."
        ]
    sentences = [f"{goal} was never reached {'; '.join(never_reached)}."] if never_reached else []
    if partly:
        sentences.append(f"{goal if not never_reached else 'It'} was reached only with some seeds by {listed(partly)}.")
    return [" ".join(sentences)]


def _by(algorithms: Sequence[str], results: StudyDisplay) -> str:
    if len(algorithms) == len(results.algorithms):
        return "by any algorithm" if len(algorithms) > 1 else f"by {algorithms[0]}"
    return f"by {listed(algorithms)}"
