"""Compare the processor time of each folder of tests with its budget in tests/budget.json; fail if one is exceeded.

    make test-budget                    after `make test` and `make test-rest`
    make test-budget BUDGET=--record    record the present costs as budgets

The budget has the processor seconds of one machine. Another machine, or a busy one, is as fast as the middle one of its
folders says: a folder is over its budget if it grew by more than half beside the others.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
CACHE = HERE.parent / ".pytest_cache" / "v" / "hansa"
ROOM = 1.5  # times its budget, and SPARE seconds, that a folder may take: processor time varies by a third
SPARE = 5.0
DEAREST = 10


def main() -> int:
    costs: dict[str, float] = {}
    for tier in ("fast", "rest"):
        path = CACHE / tier / "costs"
        if not path.exists():
            print(
                f"budget: there is no record of the tier {tier!r}; run 'make test' and 'make test-rest' first",
                file=sys.stderr,
            )
            return 2
        costs |= {f"{tier} {name}": cost for name, cost in json.loads(path.read_text()).items()}
    folders: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    for name, cost in costs.items():
        folder = name.partition("::")[0].split("/")[1]
        folders[folder if "." not in folder else "(files)"] += cost  # type: ignore[assignment]
        tests[folder if "." not in folder else "(files)"] += 1
    file = HERE / "budget.json"
    if sys.argv[1:] == ["--record"]:
        file.write_text(json.dumps({name: round(cost, 1) for name, cost in sorted(folders.items())}, indent=1) + "\n")
    budget = json.loads(file.read_text())
    print(f"{'folder':12} {'tests':>6} {'seconds':>8} {'budget':>8}")
    speed = statistics.median(folders[name] / cost for name, cost in budget.items())
    over = []
    for name, cost in folders.most_common():
        allowed = speed * budget.get(name, 0.0)
        if cost > ROOM * allowed + SPARE:
            over.append(name)
        print(f"{name:12} {tests[name]:6} {cost:8.1f} {allowed:8.1f}{'  over its budget' if name in over else ''}")
    print(f"{'all':12} {len(costs):6} {sum(folders.values()):8.1f} {speed * sum(budget.values()):8.1f}")
    print("the dearest tests, in seconds of this machine's processor time:")
    for name, cost in sorted(costs.items(), key=lambda item: -item[1])[:DEAREST]:
        print(f"{cost:8.1f}  {name}")
    if over:
        print(
            f"budget: {', '.join(over)} took more than {ROOM} times the budget; make the tests cheaper, mark them "
            "'slow' or 'night', or record the new budget with 'make test-budget BUDGET=--record' and say why",
            file=sys.stderr,
        )
    return 1 if over else 0


if __name__ == "__main__":
    raise SystemExit(main())
