"""The parties' ops of FedV (Xu et al. 2021): encrypt a batch, and give out keys for sums of enough rows.

For a batch every party with columns sends one message: its scores, encrypted so that only the sum over all parties can
be decrypted, and its columns, encrypted so that only inner products over the rows can be decrypted. The key authority
gives the aggregator one key of each kind per batch. It has no samples, and gets no ciphertext. Parties order the rows
of a batch by a secret that the aggregator does not know.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from hansa.core.entries import WHOLE, Number, Shaped, Sizes, stated
from hansa.core.fields import Owner
from hansa.core.op import Memory, Op, Party, Payload, Reply, Shape
from hansa.core.quantities import MANY, SUM_RANGES, BatchSize, Count, Epochs
from hansa.core.registry import register
from hansa.core.route_op import Message, RouteOp
from hansa.plumbing import codec
from hansa.plumbing.errors import PartyError
from hansa.secure.byte_tensors import as_bytes, as_tensor, to_table
from hansa.secure.encoding import Numbers
from hansa.vertical import inner_products
from hansa.vertical.linear_model import (
    LINEAR_ROLES,
    PLACES,
    WEIGHTS,
    LinearRoles,
    Loss,
    Residual,
    W,
    batch_count,
    batch_places,
    features_of,
    score_steps,
    steps_of,
    targets_of,
)
from hansa.vertical.psi_group import POINT
from hansa.vertical.psi_ops import ROWS, secret_order
from hansa.vertical.split_ops import common_rows, whole_numbers

SCORE_BITS, WEIGHT_BITS, FEATURE_BITS = 12, 10, 8  # scores are multiples of 2^-12, residuals of 2^-10, features of 2^-8
ROOT, ORDER = "fedv/root", "fedv/order"  # in a party's memory: its secret, and the secret of the order of rows
SCORES, FEATURES, KEYS = "scores", "features", "keys"  # the tensors of replies
STEP = Number(whole=True, least=0, owner=Owner(0, 1e9))
FEW = Number(whole=True, least=1, owner=Owner(0, MANY))
MOST_RANGE = 2.0**10  # of scores: sums of larger ones take too long to find
LEAST = 2  # the fewest rows of a sum that the authority ever gives a key for


def label_of(round: int, step: int, kind: str) -> str:
    """The name of the bases of a batch."""
    return f"fedv {round} {step} {kind}"


def label_offset(parties: int, range: float) -> int:
    """By how much a label moves the sum of scores of the support vector machine, so that the sign tells the label."""
    return 2 * int(parties * range * 2**SCORE_BITS) + 1


@register("fedv-secrets")
@dataclass(frozen=True)
class FedVSecrets(RouteOp):
    """The authority sends each party with columns a secret of its own, and all of them the secret of the order."""

    entries = stated()

    def send(self, party: Party, payload: Payload, receivers: tuple[int, ...],
             memory: Memory) -> tuple[Mapping[int, Message], Memory]:  # fmt: skip
        roots = {receiver: as_tensor(party.private("fedv root", receiver)) for receiver in receivers}
        order = as_tensor(party.private("fedv order"))
        messages = {receiver: {"root": root, "order": order} for receiver, root in roots.items()}
        return messages, {**memory, **{f"{ROOT}.{receiver}": root for receiver, root in roots.items()}}

    def receive(self, party: Party, payload: Payload, inbox: Mapping[int, Message],
                memory: Memory) -> tuple[Reply | None, Memory]:  # fmt: skip
        if len(inbox) != 1:
            raise PartyError("malformed ask: expected the secrets of one key authority")
        (message,) = inbox.values()
        return None, {**memory, ROOT: message["root"].cpu(), ORDER: message["order"].cpu()}

    def expects_message(self, payload: Payload, sender: int, receiver: int) -> dict[str, Shape]:
        return {name: ((32,), torch.uint8) for name in ("root", "order")}


@register("fedv-batch")
@dataclass(frozen=True)
class FedVBatch(Op):
    """Send the scores of one batch for the weights `w` of the payload, and the columns, both encrypted.

    The payload's `step` is the number of the batch in the round, and `columns` the number of the party's columns.
    """

    loss: Loss = "logistic"
    epochs: Epochs = 1
    batch: BatchSize = 64
    range: Annotated[float, Meta(gt=0, le=MOST_RANGE), SUM_RANGES] = 64.0

    entries = stated(**LINEAR_ROLES, step=STEP, w=W, columns=FEW)

    def check_ask(self, payload: Payload, sizes: Sizes) -> None:
        self.rows(LinearRoles.of(payload), payload)

    def rows(self, roles: LinearRoles, payload: Payload) -> tuple[int, int]:
        """The number of the batch, and its number of rows."""
        step, count = payload.get("step"), batch_count(roles.rows, self.batch)
        if not whole_numbers([step], 0) or step >= count * self.epochs:  # type: ignore[operator]
            raise PartyError("malformed ask: there is no such batch in the round")
        assert isinstance(step, int)
        return step, roles.rows // count + (step % count < roles.rows % count)

    def demands(self, n: int, payload: Payload) -> dict[str, int]:
        roles = LinearRoles.of(payload)
        return {"epochs": self.epochs, "steps": 1, "parameters": sum(roles.widths.values()) + 1}

    def expects(self, payload: Payload) -> dict[str, Shape]:
        rows, columns = self.rows(LinearRoles.of(payload), payload)[1], payload.get("columns")
        if not whole_numbers([columns]):
            raise PartyError("malformed ask: expected a number of columns")
        return {SCORES: ((rows, POINT), torch.uint8), FEATURES: ((rows, columns, POINT), torch.uint8)}  # type: ignore[dict-item]

    def impossible(self, reply: Reply, payload: Payload) -> str | None:
        valid = all(inner_products.valid(points) for points in reply.tensors.values())
        return None if valid else "its ciphertexts are not elements of ristretto255"

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        roles = LinearRoles.of(payload)
        if party.id not in roles.widths or payload.get("columns") != roles.widths[party.id]:
            raise PartyError("malformed ask: it names other columns than the party's")
        if ROOT not in memory or ORDER not in memory:
            raise PartyError("it has no secret of the key authority")
        step, count = self.rows(roles, payload)
        root, w = as_bytes(memory[ROOT]), sent_weights(payload, roles.length(party.id))
        # A secret encrypts the numbers of one batch: other numbers under the same secret would reveal differences. The
        # ask is compared first: whether other weights give other numbers depends on the samples.
        batch = f"fedv {hashlib.sha256(root).hexdigest()[:16]} {party.round} {step}"
        party.vault.once(f"{batch} ask", codec.digest({"op": repr(self), **payload}))
        places = batch_places(party, roles.rows, self.batch, self.epochs)[step]
        order = hashlib.blake2b(f"{party.round} {step}".encode(), key=as_bytes(memory[ORDER]), digest_size=32).digest()
        at = common_rows(memory, ROWS, roles)[places][secret_order(order, count)]
        holds = party.id == roles.holder
        x = features_of(party, roles, party.data.features("train"))[at]
        scores = score_steps(party, x @ w, self.range, SCORE_BITS)
        if holds:
            scores = self._with_targets(party, scores, party.data.rows("train")[1][at], roles)
        columns = steps_of(x[:, : roles.widths[party.id]], FEATURE_BITS)
        said = {"scores": torch.from_numpy(scores), "features": torch.from_numpy(columns)}
        party.vault.once(batch, codec.digest(said))
        over_parties, over_rows = batch_secrets(root, party.round, step, count)
        row_bases = inner_products.bases_of(label_of(party.round, step, "rows"), count)
        column_bases = inner_products.bases_of(label_of(party.round, step, f"columns {party.id}"), columns.shape[1])
        sealed = {SCORES: inner_products.encrypt(scores[None], [over_parties], row_bases)[0],
                  FEATURES: inner_products.encrypt(columns, over_rows, column_bases)}  # fmt: skip
        return Reply(sealed), memory

    def _with_targets(self, party: Party, scores: Numbers, y: Tensor, roles: LinearRoles) -> Numbers:
        residual = Residual.KINDS[self.loss]
        if self.loss == "svm":
            signs = targets_of(y, residual).numpy().astype(np.int64)
            return scores + signs * label_offset(len(roles.widths), self.range)
        return scores - residual.step * score_steps(party, targets_of(y, residual), self.range, SCORE_BITS)


def sent_weights(payload: Payload, length: int) -> Tensor:
    """The weights of a payload; a PartyError if they are malformed."""
    w: Any = payload.get("w")
    if not isinstance(w, Tensor) or w.dtype != torch.float64 or tuple(w.shape) != (length,):
        raise PartyError(f"malformed ask: expected {length} weights")
    if not bool(torch.isfinite(w).all()):
        raise PartyError("malformed ask: its weights are not finite")
    return w.cpu()


def batch_secrets(root: bytes, round: int, step: int, rows: int) -> tuple[int, list[int]]:
    """A party's secrets for one batch: one for its scores, and one per row for its columns."""
    (over_parties,) = inner_products.secrets_of(root, f"scores {round} {step}", 1)
    return over_parties, inner_products.secrets_of(root, f"rows {round} {step}", rows)


@register("fedv-key")
@dataclass(frozen=True)
class FedVKey(Op):
    """At the authority: the key for the sums of scores, or with `weights` the keys for inner products over the rows.

    The authority prevents inferences: it gives one key of each kind per batch, for the sum over all parties with equal
    weights, and only for weights that spread over at least `least` rows. Weights of few rows, or with few large ones
    among small ones, would reveal single rows.
    """

    least: Count = 8
    serves: ClassVar[bool] = True

    entries = stated(**LINEAR_ROLES, step=STEP, batch=FEW, weights=Shaped(types=WHOLE, shape=(None,), optional=True))

    def check_ask(self, payload: Payload, sizes: Sizes) -> None:
        LinearRoles.of(payload)

    def demands(self, n: int, payload: Payload) -> dict[str, int]:
        return {"participants": len(LinearRoles.of(payload).widths)}

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        roles, step, rows = LinearRoles.of(payload), payload.get("step"), payload.get("batch")
        if not whole_numbers([step], 0) or not whole_numbers([rows]) or rows > roles.rows:  # type: ignore[operator]
            raise PartyError("malformed ask: expected the number of a batch and of its rows")
        assert isinstance(step, int) and isinstance(rows, int)
        known = {name for name in memory if name.startswith(f"{ROOT}.")}
        if known != {f"{ROOT}.{other}" for other in roles.widths}:
            raise PartyError("it gives keys only for sums over all parties that it gave secrets to")
        roots = {other: as_bytes(memory[f"{ROOT}.{other}"]) for other in roles.widths}
        weights = payload.get("weights")
        numbers = None if weights is None else self._checked(weights, rows, max(LEAST, self.least, party.min_rows))
        mine = hashlib.sha256(b"".join(roots.values())).hexdigest()[:16]
        kind = "sum" if numbers is None else "weights"
        party.vault.once(f"fedv-key {mine} {party.round} {step} {kind}", codec.digest(dict(payload)))
        secrets = {other: batch_secrets(root, party.round, step, rows) for other, root in roots.items()}
        if numbers is None:
            keys = [inner_products.key_of([1] * len(roots), [own for own, _ in secrets.values()])]
        else:
            keys = [inner_products.key_of(numbers, own) for _, own in secrets.values()]
        return Reply({KEYS: to_table(keys, 32)}), memory

    def _checked(self, weights: Any, rows: int, least: int) -> list[int]:
        if not isinstance(weights, Tensor) or weights.dtype != torch.int64 or tuple(weights.shape) != (rows,):
            raise PartyError(f"malformed ask: expected a weight for each of {rows} rows")
        numbers: list[int] = weights.tolist()
        if not spread(numbers, least):
            raise PartyError(
                f"it gives no key for weights that spread over fewer than {least} rows: the sum would reveal "
                "single rows"
            )
        return numbers

    def expects(self, payload: Payload) -> dict[str, Shape]:
        count = 1 if payload.get("weights") is None else len(LinearRoles.of(payload).widths)
        return {KEYS: ((count, 32), torch.uint8)}


def spread(weights: list[int], least: int) -> bool:
    """Whether the sum of absolute weights is at least `least` times the largest one: no few rows dominate."""
    return sum(map(abs, weights)) >= least * max(map(abs, weights), default=0) > 0


@register("fedv-keep")
@dataclass(frozen=True)
class FedVKeep(Op):
    """Keep the party's part of the model, for tests and for scores of people."""

    entries = stated(**LINEAR_ROLES, w=W)

    def check_ask(self, payload: Payload, sizes: Sizes) -> None:
        LinearRoles.of(payload)

    def demands(self, n: int, payload: Payload) -> dict[str, int]:
        return {"parameters": sum(LinearRoles.of(payload).widths.values()) + 1}

    def run(self, party: Party, payload: Payload, memory: Memory) -> tuple[Reply, Memory]:
        roles = LinearRoles.of(payload)
        if party.id not in roles.widths:
            raise PartyError("malformed ask: the party has no columns in this job")
        w = sent_weights(payload, roles.length(party.id))
        return Reply({}), {**memory, WEIGHTS: w, PLACES: roles.places}

    def expects(self, payload: Payload) -> dict[str, Shape]:
        return {}
