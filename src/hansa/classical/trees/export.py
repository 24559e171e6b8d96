"""What can be read from a saved model of trees: importances of features, and the model in LightGBM's text format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hansa.classical.trees.bins import Bins
from hansa.classical.trees.table import TreeArrays
from hansa.plumbing.errors import DataError

Array = np.ndarray[Any, Any]
LARGEST = 1.7976931348623157e308  # as a threshold: all numbers go left, missing values alone go right
CATEGORY, DEFAULT_LEFT, MISSING_NAN = 1, 2, 8  # LightGBM's bits of a decision


def _read(model: Mapping[str, Any]) -> tuple[Mapping[str, Any], Bins, TreeArrays]:
    payload = model.get("payload")
    if not isinstance(payload, Mapping) or "trees" not in payload or "bins" not in payload:
        raise DataError("this is not a trained model of boosting or random-forest; give result.saved_model()")
    bins = Bins.of(payload["bins"])
    return payload, bins, TreeArrays.of(payload["trees"], bins)


def importances(model: Mapping[str, Any], kind: str = "gain") -> Array:
    """The importance of each feature in a saved model of trees: its share of the gain of all splits, or of the splits.

    `model` is `result.saved_model()`; `kind` is "gain" or "splits". The shares add up to 1, or are 0 without a split.
    """
    if kind not in ("gain", "splits"):
        raise DataError(f"importances: kind must be 'gain' or 'splits', got {kind!r}")
    _, bins, trees = _read(model)
    inner = trees.feature >= 0
    weights = trees.gain[inner] if kind == "gain" else None
    shares = np.bincount(trees.feature[inner], weights, minlength=len(bins.widths)).astype(np.float64)
    return shares / shares.sum() if shares.sum() > 0 else shares


def lightgbm_model(model: Mapping[str, Any], columns: Sequence[str] | None = None) -> str:
    """A saved model of trees in LightGBM's text format, which `lightgbm.Booster(model_str=...)` reads.

    LightGBM's raw scores of boosting are those of the model, to the last bit: it compares as Hansa does (x <= cut), in
    float64, sends missing values in the learned direction, and unknown categories to the right. For a forest, its
    predictions are class frequencies (for two classes, those of class 1). `columns` names the features.
    """
    payload, bins, trees = _read(model)
    loss, classes, features = payload["loss"], int(payload["classes"]), len(bins.widths)
    names = [f"Column_{k}" for k in range(features)] if columns is None else list(columns)
    if len(names) != features or any(set(str(name)) & set(" \t\n=") for name in names):
        raise DataError(f"lightgbm_model: columns must be {features} names without spaces and '='")
    outputs, first = _outputs(loss, classes)
    objective = {"logistic": "binary sigmoid:1", "softmax": f"multiclass num_class:{classes}", "squared": "regression"}
    head = ["tree", "version=v4", f"num_class={len(outputs)}", f"num_tree_per_iteration={len(outputs)}",
            "label_index=0", f"max_feature_idx={features - 1}"]  # fmt: skip
    head += [f"objective={objective[loss]}"] if loss in objective else ["average_output"]
    head += [f"feature_names={' '.join(map(str, names))}", f"feature_infos={' '.join(['none'] * features)}", ""]
    base = payload["base"].numpy() if loss != "forest" else np.full(len(outputs), payload["centre"])
    text: list[str] = []
    for tree in range(len(trees.roots)):
        for output in outputs if loss == "forest" else [int(trees.outputs[tree])]:
            place = output - first
            start = base[place] if loss == "forest" or tree < len(outputs) else None
            text.append(_tree(len(text), trees, bins, tree, output if loss == "forest" else 0, start))
    return "\n".join([*head, *text, "end of trees", "", "parameters:", "end of parameters", ""])


def _outputs(loss: str, classes: int) -> tuple[list[int], int]:
    """The outputs that LightGBM has, and the number of the first one."""
    if loss == "forest":
        return ([1], 1) if classes == 2 else (list(range(max(1, classes))), 0)
    return list(range(classes if loss == "softmax" else 1)), 0


def _tree(number: int, trees: TreeArrays, bins: Bins, tree: int, output: int, start: float | None) -> str:
    """One tree; `start` is added to its values."""
    inner, leaves = _walk(trees, int(trees.roots[tree]))
    place = {node: k for k, node in enumerate(inner)} | {node: ~k for k, node in enumerate(leaves)}
    sets = [node for node in inner if trees.choice[node] >= 0]
    rows = {node: k for k, node in enumerate(sets)}
    words = [_bitset(_categories(bins, trees, node)) for node in sets]

    def threshold(node: int) -> float:
        if node in rows:
            return rows[node]
        cuts = bins.of_feature(trees.feature[node])
        return float(cuts[trees.bin[node]]) if trees.bin[node] < len(cuts) else LARGEST

    def kind(node: int) -> int:
        return CATEGORY if node in rows else MISSING_NAN + (DEFAULT_LEFT if trees.missing[node] else 0)

    def value(node: int) -> float:
        own = float(trees.value[node, output])
        return own if start is None else float(start) + own

    def each(of: Callable[[int], Any], nodes: Iterable[int]) -> str:
        return " ".join(f"{of(node):.17g}" if isinstance(of(node), float) else str(of(node)) for node in nodes)

    lines = [f"Tree={number}", f"num_leaves={len(leaves)}", f"num_cat={len(sets)}"]
    if inner:
        lines += [
            f"split_feature={each(lambda node: int(trees.feature[node]), inner)}",
            f"split_gain={each(lambda node: float(trees.gain[node]), inner)}",
            f"threshold={each(threshold, inner)}",
            f"decision_type={each(kind, inner)}",
            f"left_child={each(lambda node: place[int(trees.child[node])], inner)}",
            f"right_child={each(lambda node: place[int(trees.child[node]) + 1], inner)}",
        ]
    lines += [f"leaf_value={each(value, leaves)}", f"leaf_weight={each(lambda node: 0, leaves)}",
              f"leaf_count={each(lambda node: int(trees.count[node]), leaves)}"]  # fmt: skip
    if inner:
        lines += [f"internal_value={each(value, inner)}", f"internal_weight={each(lambda node: 0, inner)}",
                  f"internal_count={each(lambda node: int(trees.count[node]), inner)}"]  # fmt: skip
    if sets:
        ends = np.cumsum([0, *(len(part) for part in words)])
        lines += [f"cat_boundaries={' '.join(map(str, ends))}",
                  f"cat_threshold={' '.join(str(word) for part in words for word in part)}"]  # fmt: skip
    return "\n".join([*lines, "is_linear=0", "shrinkage=1", "", ""])


def _walk(trees: TreeArrays, root: int) -> tuple[list[int], list[int]]:
    """The inner nodes and the leaves of a tree, parents before their children."""
    inner, leaves, ahead = [], [], [root]
    while ahead:
        node = ahead.pop(0)
        if trees.feature[node] < 0:
            leaves.append(node)
        else:
            inner.append(node)
            ahead += [int(trees.child[node]), int(trees.child[node]) + 1]
    return inner, leaves


def _categories(bins: Bins, trees: TreeArrays, node: int) -> Array:
    """The categories that go left at a node."""
    categories = bins.of_feature(trees.feature[node])
    chosen: Array = categories[trees.sets[trees.choice[node], : len(categories)] == 1]
    return chosen


def _bitset(categories: Array) -> list[int]:
    """Categories as LightGBM's set: bit c of a sequence of 32-bit words."""
    words = [0] * (int(categories.max(initial=0)) // 32 + 1)
    for category in categories.astype(int).tolist():
        words[category // 32] |= 1 << category % 32
    return words
