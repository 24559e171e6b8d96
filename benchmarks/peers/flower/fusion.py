"""Flower's fusions: the functions that its strategies call, on updates as lists of arrays."""

from __future__ import annotations

from flwr.common import Code, FitRes, Status, ndarrays_to_parameters
from flwr.server.strategy.aggregate import (
    aggregate,
    aggregate_inplace,
    aggregate_krum,
    aggregate_median,
    aggregate_trimmed_avg,
)
from updates import FAULTY, arguments, matrix, samples, serve


def main() -> None:
    given = arguments()
    updates = matrix(given.rows, given.columns)
    results = [([row], weight) for row, weight in zip(updates, samples(given.rows), strict=True)]
    replies = [
        (None, FitRes(Status(Code.OK, ""), ndarrays_to_parameters(arrays), weight, {})) for arrays, weight in results
    ]
    alike = [(arrays, 1) for arrays, _ in results]
    f = int(FAULTY * given.rows)
    rules = {
        "mean": lambda: aggregate(results)[0],
        "mean, in place": lambda: aggregate_inplace(replies)[0],
        "median": lambda: aggregate_median(results)[0],
        "trimmed-mean": lambda: aggregate_trimmed_avg(results, FAULTY)[0],
        "krum": lambda: aggregate_krum(results, f, 0)[0],
        "multi-krum": lambda: aggregate_krum(alike, f, given.rows - f - 2)[0],
    }
    serve(rules, given.keep, "flwr")


if __name__ == "__main__":
    main()
