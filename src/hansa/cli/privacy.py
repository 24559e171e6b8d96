"""The commands for privacy: calibrate noise, show what a party has spent, acknowledge the loss of its record."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hansa.cli.app import Json, app

if TYPE_CHECKING:
    from hansa.net.party.policy import Policy

privacy = typer.Typer(no_args_is_help=True, help="Privacy: calibrate noise, show spending, acknowledge a loss.")
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
        str | None,
        typer.Option("--accountant", help="rdp or pld. Default: that of runs, pld for central DP and rdp for DP-SGD."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print the sigma that an epsilon requires, or the epsilon of a sigma, for DP-SGD or central DP."""
    from hansa.core.budget import Release
    from hansa.plumbing.errors import ConfigError
    from hansa.privacy import CentralDP, accounting

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
    if accountant not in (None, "rdp", "pld"):
        raise ConfigError(f"--accountant must be rdp or pld, got {accountant!r}")
    own = accountant or (CentralDP.accountant if samples is None else "rdp")  # parties' budgets are by rdp
    method: accounting.Method = "pld" if own == "pld" else "rdp"
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


State = Annotated[Path, typer.Option("--state", help="Folder of the party, as in `hansa join --state`.")]


@privacy.command()
def spent(state: State, as_json: Json = False) -> None:
    """Print what a deployed party has spent and what is left: epsilon, queries by kind, declined asks."""
    from hansa.net.party.spending import in_words, report
    from hansa.net.party.vault_lines import read_vault
    from hansa.privacy import spent as accountant

    spending = report(read_vault(state), _policy(state), accountant)
    if as_json:
        typer.echo(json.dumps(spending))
        return
    for line in in_words(spending):
        typer.echo(line)


@privacy.command("acknowledge-loss")
def acknowledge_loss(state: State, as_json: Json = False) -> None:
    """Accept that a part of a party's vault is lost: all that could have been spent counts as spent."""
    from hansa.net.party.restored import acknowledge_loss as acknowledge
    from hansa.net.party.store import PartyStore
    from hansa.privacy import spent as accountant

    _policy(state)
    store = PartyStore(state)  # nobody else uses the folder meanwhile
    try:
        lost = acknowledge(state, store.policy, accountant)
    finally:
        store.close()
    if as_json:
        typer.echo(json.dumps({"lost": lost}))
        return
    typer.echo("counted as spent, and the party's secret is replaced:")
    for name, amount in lost.items():
        typer.echo(f"  {name}: {'without limit' if amount is None else f'{amount:.4g}'}")


def _policy(state: Path) -> Policy:
    """The policy of a party; a ConfigError if the folder has none."""
    from hansa.net.party.policy import Policy
    from hansa.plumbing.errors import ConfigError

    if not (state / "party.toml").exists():
        raise ConfigError(f"{state} is not the folder of a party: it has no party.toml")
    return Policy.read(state / "party.toml")
