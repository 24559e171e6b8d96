"""Detection of a vault that was restored from a backup, which would give privacy budget back.

With every receipt the party stores the mark of its vault (`vault_marks.py`), and the aggregator has the newest one,
signed by the party. A vault without the content of such a mark is older than an answer of this party. The stored mark
detects that the vault alone was restored, the aggregator's that the whole folder was. An aggregator that keeps it back
hides that.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hansa.core.budget import Accountant
from hansa.net.party.policy import Policy
from hansa.net.party.receipts import NEWEST, Receipts
from hansa.net.party.spending import left
from hansa.net.party.vault import PartyVault
from hansa.net.party.vault_lines import FILE
from hansa.net.party.vault_marks import VaultMarks
from hansa.plumbing import disk
from hansa.plumbing.crash_points import steps
from hansa.plumbing.errors import ConfigError


def _older(folder: Path, than: str) -> ConfigError:
    return ConfigError(
        f"{folder / FILE} is older than {than}: it was restored from a backup, and would give privacy budget back; put "
        f"the newest file there, or run `hansa privacy acknowledge-loss --state {folder}`, after which all that could "
        "have been spent counts as spent"
    )


def check_current(folder: Path, marks: VaultMarks, stored: str | None, newest: str | None) -> None:
    """Raise a ConfigError if the vault lacks the content of the mark stored with a receipt, or of the aggregator's."""
    if stored is not None and marks.missing({stored}):
        raise _older(folder, "the party's newest receipt")
    if newest is not None and marks.missing({newest}):
        disk.put(folder / NEWEST, [newest.encode()], steps("private"))
        raise _older(folder, "the newest answer that the aggregator has from this party")


def check_present(folder: Path, marks: VaultMarks) -> None:
    """Raise a ConfigError if the vault's file has become shorter while the party ran."""
    if marks.cut:
        raise _older(folder, "the party that uses it")


def acknowledge_loss(folder: Path, policy: Policy, accountant: Accountant) -> Mapping[str, float | None]:
    """Count all that could have been spent as spent; return the amounts, None without a limit.

    A ConfigError if nothing is missing from the vault. The caller holds the lock of the party's folder.
    """
    vault = PartyVault(folder, accountant, policy.privacy.budget, policy.peers)
    mark = Receipts(folder).newest_mark()
    missing = VaultMarks(folder).missing({mark} if mark is not None else ())
    if not missing:
        raise ConfigError(f"nothing is missing from {folder / FILE}: there is no loss to acknowledge")
    lost = left(vault.contents, policy, accountant)
    vault.lose(lost, missing)
    return lost
