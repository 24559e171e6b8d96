"""The attack report of a run: who could learn what, with pictures, intervals, and the command that repeats it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hansa.report import attack_plots
from hansa.report.html import Detail, Picture, Section, Sheet

Tree = Mapping[str, Any]
METHODS = {"analytic": "analytic", "dlg": "DLG", "idlg": "iDLG", "inverting": "inverting gradients"}
LIMITS = (
    "These numbers are lower bounds: they say what the attacks of this report found, and a stronger attack may find "
    "more. A protection is not proved by an attack that failed; differential privacy is proved by its accountant, and "
    "the empirical epsilon can only refute it. The reference models and the canary run repeat the run on this machine "
    "with the same settings, so an attacker is assumed to know them, and to have samples of the same distribution. "
    "Test samples stand for non-members: if they come from another distribution, membership looks easier than it is. "
    "Updates are attacked at the first model of the run, where reconstruction is easiest. Membership attacks see the "
    "final model alone: a party or an aggregator that compares the models of all rounds may find more members."
)


def contents(tree: Tree) -> tuple[str, list[str], list[Section]]:
    """Title, introduction and sections of the report."""
    about = tree["run"]
    sections: list[Section] = [who(tree)]
    for name, build in BUILDERS.items():
        if name in tree:
            title, make = build
            refused = tree[name].get("refused")
            sections += [Detail(title, f"Not possible: {refused}")] if refused else make(title, tree[name])
    sections.append(Detail("Limits", LIMITS))
    sections.append(Detail("Repeat these attacks", tree["command"], code=True))
    return f"Attacks on {about['name']}", _intro(about), sections


def guards_of(about: Tree) -> str:
    """The protections of a run, in words."""
    return ", ".join([
        f"secure sum {about['secure']}" if about["secure"] else "no secure sum",
        f"epsilon {about['dp']['epsilon']:.3g} per {about['dp']['unit']} (delta {about['dp']['delta']:g})"
        if about["dp"] else "no differential privacy",
        f"compression {about['compress']}" if about["compress"] else "no compression",
    ])  # fmt: skip


def _intro(about: Tree) -> list[str]:
    local = f" with {about['local']}" if about["local"] else ""
    return [
        f"{about['algorithm']}{local}, {about['rounds']} rounds, {about['parties']} parties, "
        f"{about['training_samples']:,} training samples; {guards_of(about)}. The model's accuracy is "
        f"{about['accuracy']:.3f} on samples that no party held and {about['accuracy_on_training']:.3f} on the "
        "training samples.",
    ]


def between(value: float, interval: Sequence[float]) -> str:
    """A number with its interval."""
    return f"{value:.3f} ({interval[0]:.3f} to {interval[1]:.3f})"


def who(tree: Tree) -> Sheet:
    """One row per observer and attack: what was found, and what a guess would give."""
    rows = [(who, sees, *row) for who, sees, found in (
        ("outsider", "answers of the final model", _outsider(tree)),
        ("party", "the shared model of every round", _party(tree)),
        ("aggregator", "updates, or their sum", _aggregator(tree)),
    ) for row in found]  # fmt: skip
    header = ("who", "sees", "attack", "found", "a guess", "meaning")
    note = (
        "A party can do whatever an outsider can, and the aggregator whatever a party can. Numbers in brackets are 95% "
        "intervals."
    )
    return Sheet("Who could learn what", header, rows, note=note, prose=True, words=5, grouped=0)


Row = tuple[str, str, str, str]


def _outsider(tree: Tree) -> list[Row]:
    rows: list[Row] = []
    if "auc" in tree.get("membership", {}).get("loss", {}):
        found = {name: each for name, each in tree["membership"].items() if isinstance(each, Mapping)}
        name = max(found, key=lambda each: found[each]["auc"])
        interval = found[name].get("auc_interval_among", found[name]["auc_interval"])
        apart = interval[0] > 0.5
        said = "members can be told apart" if apart else "no attack is better than a guess, within its interval"
        of = f", the best of {len(found)}" if len(found) > 1 else ""
        rows.append((f"membership ({name}{of})", between(found[name]["auc"], interval), "0.5", said))
    if "attributes" in tree and "columns" in tree["attributes"]:
        best = max(tree["attributes"]["columns"], key=lambda row: row["members"] - row["others"])
        gap = best["members_interval"][0] > max(best["others_interval"][1], best["prior"])
        said = "members' attributes leak" if gap else "no more for members than for others"
        rows.append((f"attribute {best['column']}", between(best["members"], best["members_interval"]),
                     f"{best['prior']:.3f}", said))  # fmt: skip
    if "right_class" in tree.get("inversion", {}):
        found = tree["inversion"]
        records = found["nearer_interval"][0] > 0.5
        said = "the result is nearer to training records" if records else "a typical sample of a class, no record"
        rows.append(("model inversion (right class)", f"{found['right_class']:.2f}", f"{found['chance']:.2f}", said))
    if tree.get("extraction", {}).get("rows"):
        last = tree["extraction"]["rows"][-1]
        rows.append((f"model copy ({last['queries']} queries)", f"{last['fidelity']:.3f}", "-",
                     "share of new samples with the model's own answer"))  # fmt: skip
    return rows + _bounds(tree.get("epsilon", {}), "final")


def _bounds(found: Tree, seen: str) -> list[Row]:
    """The row of the empirical epsilon for an observer of the final model, or of all rounds."""
    bound = found.get(seen, {}) if seen == "all_rounds" else found
    if "guesses" not in bound:
        return []
    claim = found["claimed"]
    said = "a lower bound" if claim is None else "at most the claimed one" if bound["epsilon"] <= claim else (
        "ABOVE THE CLAIM: the guarantee does not hold")  # fmt: skip
    return [(f"empirical epsilon per {found['unit']}", f"at least {bound['epsilon']:.2f}",
             "no claim" if claim is None else f"claimed {claim:.3g}", said)]  # fmt: skip


def _party(tree: Tree) -> list[Row]:
    rows = _bounds(tree.get("epsilon", {}), "all_rounds")
    whole = tree.get("gradients", {}).get("parties_sum", {})
    if whole:
        rows.append(_reconstruction(f"records from a round of {whole.get('parties', 10)} parties", whole))
    return rows


def _reconstruction(name: str, found: Tree) -> Row:
    if "refused" in found:
        return name, "nothing to read", "-", found["refused"]
    guess = f"{found['strangers']:.2f}" if "strangers" in found else "0"
    worth = "records can be rebuilt" if found["recovered"] > float(guess) else "no record was rebuilt"
    return name, f"{found['recovered']:.2f}", guess, f"{worth}; error {found['error']:.2g} (1: a blind guess)"


def _aggregator(tree: Tree) -> list[Row]:
    rows: list[Row] = []
    found = tree.get("gradients", {})
    if "single" in found:
        single = found["single"]
        if "refused" in single:
            rows.append(_reconstruction("records from one update", single))
        else:
            for size in sorted({row["samples"] for row in single["rows"]}):
                best = min((row for row in single["rows"] if row["samples"] == size), key=lambda row: row["error"])
                rows.append(_reconstruction(f"{size} sample{'s' * (size > 1)} from one update "
                                            f"({METHODS[best['method']]})", best))  # fmt: skip
        rows.append(_reconstruction("records from a whole party's update", found["party"]))
        rows.append(_reconstruction("a sum of parties with 1 sample each", found["sum"]))
    if "properties" in tree:
        known = tree["properties"]
        rows.append(("property of an update", "nothing to read", "-", known["refused"]) if "refused" in known else
                    ("property of an update", between(known["accuracy"], known["interval"]), "0.5",
                     known["property"]))  # fmt: skip
    return rows


def membership_sections(title: str, found: Tree) -> list[Section]:
    """The table and the curves of membership attacks."""
    attacks = {name: each for name, each in found.items() if isinstance(each, Mapping)}
    rows = [(name, *(between(each[key], each[f"{key}_interval"]) for key in ("auc", "tpr_at_0.01", "tpr_at_0.001")))
            for name, each in attacks.items()]  # fmt: skip
    count = next(iter(attacks.values()))["members"]
    models = f"; {found['references']} reference models" if found["references"] else ""
    note = (
        f"{count:,} members and as many other samples{models}. A guess has an AUC of 0.5 and true positive rates of "
        f"0.01 and 0.001. Below a false positive rate of 1/{count} no false positive is allowed."
    )
    header = ("attack", "AUC", "true positives\nat 1% false ones", "true positives\nat 0.1% false ones")
    caption = "Both axes are logarithmic: what matters is the left end, where the attacker is sure."
    return [Sheet(title, header, rows, note=note),
            Picture("ROC curves", caption, attack_plots.roc(attacks), "roc", under=True)]  # fmt: skip


def _epsilon(title: str, found: Tree) -> list[Section]:
    claimed = "no differential privacy" if found["claimed"] is None else f"{found['claimed']:.3f}"
    seen = {"the final model": found, "the models of all rounds": found.get("all_rounds", {})}
    rows = [(name, f"{bound['epsilon']:.3f}", claimed, f"{bound['correct']} of {bound['guesses']}")
            for name, bound in seen.items() if "guesses" in bound]  # fmt: skip
    refused = found.get("all_rounds", {}).get("refused")
    note = (
        f"One training run with {found['canaries']} canaries, delta {found['delta']:g}; each canary is one "
        f"{found['unit']} with a wrong target and joined by a fair coin. No bound may exceed the claimed epsilon. "
        f"Exposure of the canaries in the final model: {found['exposure']:.2f} bits; a guess has "
        f"{found['chance_exposure']:.2f}, the largest is {found['largest_exposure']:.2f}."
    )
    note += f" The models of all rounds were not used: {refused}." if refused else ""
    header = ("the attacker sees", "empirical epsilon,\n95% lower bound", "claimed", "correct guesses")
    return [Sheet(title, header, rows, note=note)]


def _gradients(title: str, found: Tree) -> list[Section]:
    sections: list[Section] = []
    single = found["single"]
    note = "Error: 0 is a perfect copy, 1 is no better than a blind guess. Recovered: error below 0.1."
    if "refused" in single:
        sections.append(Detail(title, f"Single updates: {single['refused']}."))
    else:
        rows = [(METHODS[row["method"]], str(row["samples"]), f"{row['error']:.3g}", f"{row['recovered']:.2f}",
                 f"{row['labels']:.2f}") for row in single["rows"]]  # fmt: skip
        header = ("attack", "samples of\nthe party", "error", "recovered", "labels found")
        sections.append(Sheet(title, header, rows, note=note))
        if single["pictures"]:
            pictures = {
                "before": single["pictures"]["truth"],
                **{METHODS[name]: rebuilt for name, rebuilt in single["pictures"]["rebuilt"].items()},
            }
            sections.append(Picture("Samples of a party, and what its update revealed", "The first row was never sent.",
                                    attack_plots.rows_of_pictures(pictures), "updates", under=True))  # fmt: skip
    others: list[tuple[str, ...]] = []
    reasons = dict[str, None]()
    for name, key in (("update of a whole party", "party"), ("sum of parties with 1 sample each", "sum"),
                      ("sum of whole parties", "parties_sum")):  # fmt: skip
        each = found[key]
        if "refused" in each:
            others.append((name, "-", "nothing to read", "-", "-"))
            reasons[f"{name}: {each['refused']}."] = None
            continue
        strangers = f"{each['strangers']:.2f}" if "strangers" in each else "-"
        others.append((name, str(each["parties"]), f"{each['error']:.3g}", f"{each['recovered']:.2f}", strangers))
    columns = ("what is attacked", "parties", "error", "recovered", "strangers")
    explained = (
        "Whole parties: distance to the nearest record, as a share of a blind guess's error; strangers: the share of "
        "samples that no party held and that have a record as close, without any attack."
    )
    note = " ".join([explained, *reasons])
    sections.append(Sheet("Whole parties, and sums", columns, others, under=True, note=note))
    if found["sum"].get("pictures"):
        pictures = {"before": found["sum"]["pictures"]["truth"], "after": found["sum"]["pictures"]["rebuilt"]}
        sections.append(Picture("Ten parties with one sample each, and what their sum revealed", "",
                                attack_plots.rows_of_pictures(pictures), "sum", under=True))  # fmt: skip
    return sections


def _inversion(title: str, found: Tree) -> list[Section]:
    rows = [
        (
            f"{found['right_class']:.2f}",
            f"{found['chance']:.2f}",
            f"{found['distance_to_member']:.3g}",
            f"{found['distance_to_other']:.3g}",
            between(found["nearer_to_members"], found["nearer_interval"]),
        )
    ]
    header = ("right class", "a guess", "distance to the\nnearest member", "distance to the\nnearest other sample",
              "nearer to a member")  # fmt: skip
    note = "A share of about 0.5 nearer to a member says that no training record was extracted."
    sections: list[Section] = [Sheet(title, header, rows, note=note)]
    if found["pictures"]:
        pictures = {"inverted": found["pictures"]["rebuilt"], "mean of the class": found["pictures"]["class_mean"],
                    "nearest member": found["pictures"]["nearest_member"]}  # fmt: skip
        sections.append(Picture("What the model knows of each class", "", attack_plots.rows_of_pictures(pictures),
                                "inversion", under=True))  # fmt: skip
    return sections


def _attributes(title: str, found: Tree) -> list[Section]:
    rows = [
        (
            row["column"],
            str(row["values"]),
            between(row["members"], row["members_interval"]),
            between(row["others"], row["others_interval"]),
            f"{row['prior']:.3f}",
        )
        for row in found["columns"]
    ]
    header = ("feature", "values", "guessed right,\nmembers", "guessed right,\nothers", "most frequent value")
    note = "A leak of training data shows as more right guesses for members than for others."
    return [Sheet(title, header, rows, note=note)]


def _properties(title: str, found: Tree) -> list[Section]:
    rows = [(found["property"], between(found["accuracy"], found["interval"]), "0.5")]
    return [Sheet(title, ("property", "accuracy", "a guess"), rows, note="A classifier on single updates.")]


def _extraction(title: str, found: Tree) -> list[Section]:
    rows = [(f"{row['queries']:,}", f"{row['fidelity']:.3f}", f"{row['accuracy']:.3f}") for row in found["rows"]]
    return [
        Sheet(title, ("queries", "fidelity", "accuracy of the copy"), rows),
        Picture(
            "Fidelity against queries",
            "Fidelity: the same class as the model's, on new samples.",
            attack_plots.fidelity(found["rows"], found["accuracy_of_model"]),
            "extraction",
            under=True,
        ),
    ]


def defences_sheet(found: Tree, title: str = "Defences") -> Sheet:
    """The table of defences: accuracy, and what attacks find."""
    rows, reasons = [], dict[str, None]()
    for row in found["rows"]:
        if "refused" in row:
            rows.append((row["defence"], "refused", "-", "-", "-"))
            reasons[f"{row['defence']}: {row['refused']}"] = None
            continue
        single, summed = row.get("single", {}), row.get("sum", {})
        reasons |= {f"{row['defence']}: {each['refused']}": None for each in (single, summed) if "refused" in each}
        cells = (_recovered(single), _recovered(summed))
        rows.append((row["defence"], f"{row['accuracy']:.3f}", between(row["auc"], row["auc_interval"]), *cells))
    header = ("defence", "accuracy", "membership AUC\n(loss)", "1 sample from\none update", "samples from\na sum of 10")
    note = (
        "The first row is the run's own model. The others were trained again with other random numbers, each with "
        "this protection alone. The last two columns are recovered shares, with the error in brackets (0: a copy, 1: "
        "a blind guess)."
    )
    return Sheet(title, header, rows, note=" ".join([note, *(f"{reason}." for reason in reasons)]))


def _defences(title: str, found: Tree) -> list[Section]:
    return [defences_sheet(found, title)]


def _recovered(found: Tree) -> str:
    if "refused" in found:
        return "nothing to read"
    return "-" if not found else f"{found['recovered']:.2f} ({found['error']:.2g})"


BUILDERS = {
    "membership": ("Membership", membership_sections),
    "epsilon": ("Empirical epsilon and canaries", _epsilon),
    "gradients": ("Samples from updates", _gradients),
    "inversion": ("Model inversion", _inversion),
    "attributes": ("Attributes", _attributes),
    "properties": ("Properties of a party", _properties),
    "extraction": ("A copy of the model", _extraction),
    "defences": ("Defences", _defences),
}
