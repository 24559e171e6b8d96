"""The commands for differential privacy: calibrate noise, and show what a party has spent."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import typer

from hansa.cli.app import Json, app

privacy = typer.Typer(no_args_is_help=True, help="Differential privacy: calibrate noise, show spending.")
app.add_typer(privacy, name="privacy")


@privacy.command()
def calibrate(
    epsilon: Annotated[
        float | None, typer.Option("--epsilon", help="Target epsilon; prints the sigma it requires.")
    ] = None,
    sigma: Annotated[
        float | None, typer.Option("--sigma", help="Noise multiplier; prints the epsilon it gives.")
    ] = None,
    delta: Annotated[float, typer.Option("--delta", help="Delta; choose it below 1 / number of records.")] = 1e-5,
    samples: Annotated[int | None, typer.Option("--samples", help="DP-SGD: number of samples of the party.")] = None,
    batch: Annotated[int | None, typer.Option("--batch", help="DP-SGD: expected batch size.")] = None,
    epochs: Annotated[
        int | None, typer.Option("--epochs", help="DP-SGD: local epochs, summed over all rounds.")
    ] = None,
    parties: Annotated[int | None, typer.Option("--parties", help="Central DP: number of parties.")] = None,
    cohort: Annotated[int | None, typer.Option("--cohort", help="Central DP: expected cohort size per round.")] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", help="Central DP: number of rounds.")] = None,
    accountant: Annotated[
        str, typer.Option("--accountant", help="Accountant: rdp, or pld (tighter and slower).")
    ] = "rdp",
    as_json: Json = False,
) -> None:
    """Print the sigma that an epsilon requires, or the epsilon of a sigma, for DP-SGD or central DP."""
    from hansa.core.budget import Release
    from hansa.core.errors import ConfigError
    from hansa.privacy import accounting

    if (epsilon is None) == (sigma is None):
        raise ConfigError("give either --epsilon (prints sigma) or --sigma (prints epsilon)")
    local, central = (samples, batch, epochs), (parties, cohort, rounds)
    if all(value is not None for value in local) and all(value is None for value in central):
        population, sample, times = (samples, "--samples"), (batch, "--batch"), (epochs, "--epochs")
    elif all(value is not None for value in central) and all(value is None for value in local):
        population, sample, times = (parties, "--parties"), (cohort, "--cohort"), (rounds, "--rounds")
    else:
        raise ConfigError("give --samples, --batch and --epochs (DP-SGD) or --parties, --cohort and --rounds (central)")
    numbers = []
    for value, name in (population, sample, times):
        if value is None or value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
        numbers.append(value)
    total, drawn, repeats = numbers
    if drawn > total:
        raise ConfigError(f"{sample[1]} {drawn} is more than {population[1]} {total}")
    rate = drawn / total
    steps = repeats * math.ceil(total / drawn) if samples is not None else repeats
    if accountant not in ("rdp", "pld"):
        raise ConfigError(f"--accountant must be rdp or pld, got {accountant!r}")
    method: accounting.Method = "pld" if accountant == "pld" else "rdp"
    if sigma is None:
        assert epsilon is not None
        sigma = accounting.calibrate(epsilon, delta, rate, steps, method)
        sigma = math.ceil(sigma * 1e4) / 1e4  # rounded up: the printed sigma still gives epsilon
    release = [Release(rate, sigma, steps)]
    epsilons = {
        "rdp": accounting.epsilon(release, delta),
        "pld": accounting.epsilon(release, delta, "pld"),
        "classic": accounting.epsilon(release, delta, conversion="classic"),
    }
    if as_json:
        finite = {name: value if math.isfinite(value) else None for name, value in epsilons.items()}
        tree = {"sigma": sigma, "epsilon": finite[method], "delta": delta, "rate": rate, "steps": steps}
        typer.echo(json.dumps(tree | {"accountant": method, "epsilons": finite}))
        return
    typer.echo(f"sigma    {sigma:.4f}")
    typer.echo(f"epsilon  {epsilons[method]:.4f} at delta {delta:g} ({method})")
    typer.echo(f"rate     {rate:.6g}, {steps} {'steps' if samples is not None else 'rounds'}")
    typer.echo("by       " + ", ".join(f"{name} {value:.4f}" for name, value in epsilons.items()))


@privacy.command()
def spent(
    state: Annotated[Path, typer.Option("--state", help="Folder of the party, as in `hansa join --state`.")],
    as_json: Json = False,
) -> None:
    """Print the privacy budget that a deployed party has spent, per job and in total."""
    from hansa.core.budget import Budget
    from hansa.core.errors import ConfigError
    from hansa.net.party.policy import Policy
    from hansa.net.party.vault import read_vault, report
    from hansa.privacy import spent as accountant

    if not (state / "party.toml").exists():
        raise ConfigError(f"{state} is not the folder of a party: it has no party.toml")
    floor = Policy.read(state / "party.toml").privacy
    spending = report(read_vault(state), floor.budget or Budget(math.inf, floor.delta), accountant)
    if as_json:
        typer.echo(json.dumps(spending))
        return
    of = "" if spending["budget"] is None else f" of {spending['budget']:g}"
    typer.echo(f"epsilon {_number(spending['epsilon'])}{of} at delta {spending['delta']:g}")
    for job, part in spending["jobs"].items():
        typer.echo(f"  {job}: epsilon {_number(part['epsilon'])}, {part['replies']} replies")


def _number(value: float | None) -> str:
    return "infinite" if value is None else f"{value:.4g}"
