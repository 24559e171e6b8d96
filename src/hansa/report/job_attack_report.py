"""The attack report of a deployed job: what its aggregator could learn from the replies that the job kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hansa.report import attack_plots
from hansa.report.attack_report import METHODS, between, guards_of, membership_sections
from hansa.report.html import Detail, Picture, Section, Sheet

Tree = Mapping[str, Any]
SAME = 0.99  # from this cosine on, two updates count as the same
SHOWN = 3  # classes of a party that the table names
NO_TRUTH = (
    "The aggregator does not have the parties' samples, so it cannot tell whether a rebuilt sample is true. Match: the "
    "cosine of the update and of the gradient of the rebuilt samples. A match of 1 says that they explain the update; "
    "other samples may explain it too."
)
LIMITS = (
    "These numbers are lower bounds: they say what the attacks of this report found, and a stronger attack may find "
    "more. The first kept update of a party is attacked, where the model has learned least; an aggregator can combine "
    "rounds. An aggregator that changes the model to learn more is not measured here. Errors and membership are those "
    "of one party, by its own file; its test samples stand for records that no party held."
)


def job_contents(tree: Tree) -> tuple[str, list[str], list[Section]]:
    """Title, introduction and sections of the report."""
    about = tree["run"]
    sections: list[Section] = [job_who(tree)]
    for name, (title, make) in BUILDERS.items():
        if name in tree:
            refused = tree[name].get("refused")
            sections += [Detail(title, f"Not possible: {refused}.")] if refused else make(title, tree[name])
    sections.append(Detail("Limits", LIMITS))
    sections.append(Detail("Repeat these attacks", tree["command"], code=True))
    local = f" with {about['local']}" if about["local"] else ""
    scored = (
        f"The records of {about['owner']} are known: its attacks are scored." if about["owner"]
        else "No party gave its records: nothing is scored."
    )  # fmt: skip
    intro = (
        f"A deployed job: {about['algorithm']}{local}, {about['rounds']} rounds, {about['parties']} parties; "
        f"{guards_of(about)}. Updates of {about['updates']} parties were kept. {scored}"
    )
    return f"Attacks on {about['name']}", [intro], sections


def job_who(tree: Tree) -> Sheet:
    """One row per observer and attack: what was found, and what a guess would give."""
    rows: list[tuple[str, ...]] = []
    found = tree.get("membership", {})
    for who, sees, name, words in (("outsider", "answers of the final model", "loss", "loss"),
                                   ("aggregator", "updates of a party", "updates", "its updates")):  # fmt: skip
        if name in found:
            low = found[name]["auc_interval"][0]
            said = "members can be told apart" if low > 0.5 else "no better than a guess, within its interval"
            rows.append((who, sees, f"membership of {tree['run']['owner']}'s records ({words})",
                         between(found[name]["auc"], found[name]["auc_interval"]), "0.5", said))  # fmt: skip
    rows += [("aggregator", "updates of a party", *row) for row in (*_rebuilt(tree), *_classes(tree))]
    note = "Numbers in brackets are 95% intervals."
    return Sheet("Who could learn what", ("who", "sees", "attack", "found", "a guess", "meaning"), rows, note=note,
                 prose=True, words=5, grouped=0)  # fmt: skip


def best_rows(rows: Sequence[Tree]) -> list[Tree]:
    """The best attack on each party: of least error where it is scored, else of the best match."""

    def worth(row: Tree) -> float:
        return -float(row["score"]["error"]) if "score" in row else float(row["match"])

    out: dict[str, Tree] = {}
    for row in rows:
        out[row["party"]] = max(out.get(row["party"], row), row, key=worth)
    return list(out.values())


def _rebuilt(tree: Tree) -> list[tuple[str, str, str, str]]:
    found, out = tree.get("gradients", {}), []
    if "refused" in found:
        return [("samples from one update", "nothing to read", "-", found["refused"])]
    for row in best_rows(found.get("kept", ())):
        name = f"{row['rebuilt']} of {_count(row)} of {row['party']} ({METHODS[row['method']]})"
        if "score" in row:
            score = row["score"]
            guess = f"{score['strangers']:.2f}" if "strangers" in score else "0"
            said = "records can be rebuilt" if score["recovered"] > float(guess) else "no record was rebuilt"
            out.append((name, f"{score['recovered']:.2f} recovered", guess,
                        f"{said}; error {score['error']:.2g} (1: a blind guess)"))  # fmt: skip
        else:
            said = "explains the update" if row["match"] > SAME else "explains the update in part"
            out.append((name, f"match {row['match']:.3f}", "-", f"{said}; whether it is true is not known here"))
    return out


def _classes(tree: Tree) -> list[tuple[str, str, str, str]]:
    found = tree.get("properties", {})
    if "refused" in found:
        return [("classes of a party", "nothing to read", "-", found["refused"])]
    out = []
    for row in found.get("kept", ()):
        name = f"classes of {row['party']}"
        if "distance" in row:
            out.append((name, f"distance {row['distance']:.2f}", f"{row['guess']:.2f}",
                        "from the true shares of classes (0: exact, 1: all wrong)"))  # fmt: skip
        else:
            out.append((name, _largest(row["shares"]), "-", "largest shares; whether they are true is not known here"))
    return out


def _count(row: Tree) -> str:
    if row["samples"] is None:
        return "an unknown number of samples"
    return f"{row['samples']:,} sample{'s' * (row['samples'] != 1)}"


def _gradients(title: str, found: Tree) -> list[Section]:
    rows = [(row["party"], str(row["round"]), "-" if row["samples"] is None else f"{row['samples']:,}",
             METHODS[row["method"]], str(row["rebuilt"]), f"{row['match']:.4f}", " ".join(map(str, row["labels"])))
            for row in found["kept"]]  # fmt: skip
    header = ("party", "round", "samples", "attack", "rebuilt", "match", "labels")
    note = f"{NO_TRUTH} {found['left_out']}".strip()
    sections: list[Section] = [Sheet(title, header, rows, note=note)]
    if "scored" in found:
        scored = [(METHODS[row["method"]], *(f"{row['score'][name]:.3g}" if name in row["score"] else "-"
                                             for name in ("error", "recovered", "labels", "strangers")))
                  for row in found["kept"] if "score" in row]  # fmt: skip
        columns = ("attack", "error", "recovered", "labels found", "strangers")
        sections.append(Sheet(f"Against the records of {found['scored']}", columns, scored, under=True,
                              note=" ".join(_scored(found))))  # fmt: skip
    if found["pictures"]:
        shown = found["pictures"]
        pictures = {**({"before": shown["truth"]} if shown["truth"] else {}),
                    **{METHODS[name]: each for name, each in shown["rebuilt"].items()}}  # fmt: skip
        caption = "The first row was never sent." if shown["truth"] else "Nobody here knows whether they are true."
        sections.append(Picture(f"What the update of {shown['party']} revealed", caption,
                                attack_plots.rows_of_pictures(pictures), "updates", under=True))  # fmt: skip
    return sections


def _scored(found: Tree) -> list[str]:
    out = ["Error: 0 is a perfect copy, 1 is no better than a blind guess. Recovered: error below 0.1. Strangers: the "
           "share of test samples with a record as close."]  # fmt: skip
    if found["replayed"] is not None:
        cosine = f"{found['replayed']:.6f}"
        out.append(f"Training on the file of {found['scored']} gives its kept update with a cosine of {cosine}.")
        if found["replayed"] < SAME:
            out.append("The file is not what the party trained with, or its training drew noise.")
    return out


def _properties(title: str, found: Tree) -> list[Section]:
    rows = [(row["party"], str(row["round"]), f"{row['samples']:,}", _largest(row["shares"])) for row in found["kept"]]
    note = (
        "Shares by the bias of the last layer: exact for one step from a model whose mean probabilities are known, "
        "rough after many steps."
    )
    sections: list[Section] = [
        Sheet(title, ("party", "round", "samples", "largest shares of classes"), rows, note=note)
    ]
    for row in found["kept"]:
        if "distance" in row:
            true = [(_largest(row["true"]), f"{row['distance']:.3f}", f"{row['guess']:.3f}")]
            note = (
                "Distance: half the sum of the absolute differences of both shares. A guess: the shares of the test "
                "samples."
            )
            header = ("true shares", "distance", "a guess")
            sections.append(Sheet(f"Against the records of {row['party']}", header, true, under=True, note=note))
    return sections


def _largest(shares: Sequence[float]) -> str:
    order = sorted(range(len(shares)), key=lambda label: -shares[label])[:SHOWN]
    return ", ".join(f"class {label}: {shares[label]:.0%}" for label in order if shares[label] >= 0.01)


BUILDERS = {
    "membership": ("Membership", membership_sections),
    "gradients": ("Samples from kept updates", _gradients),
    "properties": ("Classes of a party", _properties),
}
