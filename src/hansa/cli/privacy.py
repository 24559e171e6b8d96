"""The commands about privacy: how much noise a promise needs, what noise promises, what a party has spent."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import typer

from hansa.cli.app import Json, app

privacy = typer.Typer(no_args_is_help=True, help="Differential privacy: the noise that a promise needs, what is spent.")
app.add_typer(privacy, name="privacy")


@privacy.command()
def calibrate(
    epsilon: Annotated[float | None, typer.Option("--epsilon", help="The promise; gives sigma.")] = None,
    sigma: Annotated[float | None, typer.Option("--sigma", help="The noise multiplier instead; gives epsilon.")] = None,
    delta: Annotated[
        float, typer.Option("--delta", help="The promise's delta; below 1 / the number of records.")
    ] = 1e-5,
    samples: Annotated[int | None, typer.Option("--samples", help="DP-SGD: a party's samples.")] = None,
    batch: Annotated[int | None, typer.Option("--batch", help="DP-SGD: the expected batch size.")] = None,
    epochs: Annotated[int | None, typer.Option("--epochs", help="DP-SGD: local epochs over all rounds.")] = None,
    parties: Annotated[int | None, typer.Option("--parties", help="Central: how many parties there are.")] = None,
    cohort: Annotated[int | None, typer.Option("--cohort", help="Central: how many a round draws, on average.")] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", help="Central: how many rounds.")] = None,
    accountant: Annotated[
        str, typer.Option("--accountant", help="Which one the promise is by: rdp, or pld, which is tighter and slower.")
    ] = "rdp",
    as_json: Json = False,
) -> None:
    """The sigma that an epsilon needs, or the epsilon of a sigma: of DP-SGD at a party, or of central DP."""
    from hansa.core.budget import Release
    from hansa.core.errors import ConfigError
    from hansa.privacy import accounting

    if (epsilon is None) == (sigma is None):
        raise ConfigError("give either --epsilon, to learn sigma, or --sigma, to learn epsilon")
    local, central = (samples, batch, epochs), (parties, cohort, rounds)
    if all(value is not None for value in local) and all(value is None for value in central):
        of, some, times = (samples, "--samples"), (batch, "--batch"), (epochs, "--epochs")
    elif all(value is not None for value in central) and all(value is None for value in local):
        of, some, times = (parties, "--parties"), (cohort, "--cohort"), (rounds, "--rounds")
    else:
        raise ConfigError("give --samples, --batch and --epochs (DP-SGD) or --parties, --cohort and --rounds (central)")
    numbers = []
    for value, name in (of, some, times):
        if value is None or value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
        numbers.append(value)
    whole, drawn, repeated = numbers
    if drawn > whole:
        raise ConfigError(f"{some[1]} {drawn} is more than {of[1]} {whole}")
    rate = drawn / whole
    steps = repeated * math.ceil(whole / drawn) if samples is not None else repeated
    if accountant not in ("rdp", "pld"):
        raise ConfigError(f"--accountant is rdp or pld, got {accountant!r}")
    method: accounting.Method = "pld" if accountant == "pld" else "rdp"
    if sigma is None:
        assert epsilon is not None
        sigma = accounting.calibrate(epsilon, delta, rate, steps, method)
        sigma = math.ceil(sigma * 1e4) / 1e4  # as it is printed, it keeps the promise
    release = [Release(rate, sigma, steps)]
    found = {
        "rdp": accounting.epsilon(release, delta),
        "pld": accounting.epsilon(release, delta, "pld"),
        "classic": accounting.epsilon(release, delta, conversion="classic"),
    }
    if as_json:
        known = {name: value if math.isfinite(value) else None for name, value in found.items()}
        tree = {"sigma": sigma, "epsilon": known[method], "delta": delta, "rate": rate, "steps": steps}
        typer.echo(json.dumps(tree | {"accountant": method, "epsilons": known}))
        return
    typer.echo(f"sigma    {sigma:.4f}")
    typer.echo(f"epsilon  {found[method]:.4f} at delta {delta:g} ({method})")
    typer.echo(f"rate     {rate:.6g}, {steps} {'steps' if samples is not None else 'rounds'}")
    typer.echo("by       " + ", ".join(f"{name} {value:.4f}" for name, value in found.items()))


@privacy.command()
def spent(
    state: Annotated[Path, typer.Option("--state", help="The party's own folder, as `hansa join` has it.")],
    as_json: Json = False,
) -> None:
    """What a deployed party has spent of its privacy budget, by job and over all jobs."""
    from hansa.core.budget import Budget
    from hansa.core.errors import ConfigError
    from hansa.net.party.policy import Policy
    from hansa.net.party.vault import read_vault, report
    from hansa.privacy import spent as accountant

    if not (state / "party.toml").exists():
        raise ConfigError(f"{state} is no party's folder: it has no party.toml")
    floor = Policy.read(state / "party.toml").privacy
    found = report(read_vault(state), floor.budget or Budget(math.inf, floor.delta), accountant)
    if as_json:
        typer.echo(json.dumps(found))
        return
    of = "" if found["budget"] is None else f" of {found['budget']:g}"
    typer.echo(f"epsilon {_number(found['epsilon'])}{of} at delta {found['delta']:g}")
    for job, part in found["jobs"].items():
        typer.echo(f"  {job}: epsilon {_number(part['epsilon'])}, {part['replies']} replies")


def _number(value: float | None) -> str:
    return "infinite" if value is None else f"{value:.4g}"
