"""The likelihood of a party's samples: its gradient, and its curvature by the generalised Gauss-Newton matrix.

The matrix is sum_i J_i' H_i J_i: J_i is the Jacobian of the outputs for sample i, H_i the Hessian of its loss by the
outputs. It is the Hessian for linear models, and positive semi-definite for convex losses (Martens 2020).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.func import functional_call, grad, jacrev, vjp, vmap  # not jvp: it loads PyTorch's compiler

from hansa.core.op import Party
from hansa.plumbing.stopping import go_on

NUMBERS = 2**22  # of a Jacobian that are in memory at once
WHOLE = 1024  # parameters up to which the whole matrix is made
SMALL = 1e-10  # conjugate gradients end at this relative residual
ITERATIONS = 100  # and after this many steps


class Likelihood:
    """Minus the log-likelihood of a party's samples, scale * (sum of losses), as a function of the model's vector."""

    def __init__(self, party: Party, scale: float) -> None:
        self.objective, self.scale = party.objective, scale
        self.x, self.y = party.samples("train")
        self.module = self.objective.network().eval()

    def outputs(self, w: Tensor, x: Tensor) -> Tensor:
        """The model's outputs for a batch."""
        out: Tensor = functional_call(self.module, self.objective.spec.split(w), (x,))
        return out

    def loss(self, out: Tensor, y: Tensor) -> Tensor:
        """The loss of one sample."""
        return self.objective.training_losses(out[None], y[None])[0]

    def _pieces(self, w: Tensor, width: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of samples whose Jacobians fit into memory."""
        size = max(1, NUMBERS // max(1, len(w) * width))
        for x, y in zip(torch.split(self.x, size), torch.split(self.y, size), strict=True):
            go_on()
            yield x, y

    @torch.no_grad()
    def value(self, at: Tensor) -> float:
        """Minus the log-likelihood."""
        w = at.to(self.objective.dtype)
        losses = [self.objective.training_losses(self.outputs(w, x), y) for x, y in self._pieces(w, 1)]
        return self.scale * float(torch.cat(losses).double().sum())

    def gradient(self, at: Tensor) -> Tensor:
        """The gradient, in float64."""
        w, total = at.to(self.objective.dtype), torch.zeros_like(at)
        for x, y in self._pieces(w, 1):
            total = total + grad(lambda w, x=x, y=y: vmap(self.loss)(self.outputs(w, x), y).sum())(w).double()
        return self.scale * total

    def _curved(self, out: Tensor, y: Tensor) -> Tensor:
        """The Hessians of the losses by the outputs, [n, outputs, outputs]."""
        width = out[0].numel()
        hessians: Tensor = vmap(jacrev(grad(self.loss)))(out, y)
        return hessians.reshape(len(out), width, width)

    def _jacobians(self, at: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Of batches: the Jacobians [n, outputs, d] and the Hessians of the losses [n, outputs, outputs]."""
        w = at.to(self.objective.dtype)
        width = self.outputs(w, self.x[:1]).numel()
        for x, y in self._pieces(w, width):
            rows = vmap(jacrev(lambda w, x: self.outputs(w, x[None])[0]), (None, 0))(w, x).reshape(len(x), width, -1)
            yield rows.double(), self._curved(self.outputs(w, x), y).double()

    def matrix(self, at: Tensor) -> Tensor:
        """The whole matrix, exactly symmetric."""
        total = torch.zeros(len(at), len(at), dtype=torch.float64, device=at.device)
        for rows, curve in self._jacobians(at):
            total = total + torch.einsum("nad,nab,nbe->de", rows, curve, rows)
        return self.scale * (total + total.T) / 2

    def diagonal(self, at: Tensor) -> Tensor:
        """The diagonal of the matrix."""
        total = torch.zeros_like(at)
        for rows, curve in self._jacobians(at):
            total = total + torch.einsum("nad,nab,nbd->d", rows, curve, rows)
        return self.scale * total

    def product(self, at: Tensor, vector: Tensor) -> Tensor:
        """The matrix times a vector, without the matrix."""
        w, v, total = at.to(self.objective.dtype), vector.to(self.objective.dtype), torch.zeros_like(at)
        for x, y in self._pieces(w, 1):
            out, back, *_ = vjp(lambda w, x=x: self.outputs(w, x), w)  # back(u) = J' u, so its own vjp is u -> J u
            _, forward, *_ = vjp(lambda u, back=back: back(u)[0], torch.zeros_like(out))
            curve = self._curved(out, y)
            curved = torch.einsum("nab,nb->na", curve, forward(v)[0].flatten(1)).view_as(out)
            total = total + back(curved)[0].double()
        return self.scale * total

    def solved(self, at: Tensor, diagonal: Tensor, vector: Tensor) -> Tensor:
        """(diagonal + matrix)^-1 times a vector; for large models by conjugate gradients."""
        if len(at) <= WHOLE:
            exact: Tensor = torch.linalg.solve(torch.diag(diagonal) + self.matrix(at), vector)
            return exact
        result, residual = torch.zeros_like(vector), vector
        direction, size = residual, float(residual @ residual)
        enough = SMALL**2 * size
        for _ in range(ITERATIONS):
            if size <= enough:
                break
            product = diagonal * direction + self.product(at, direction)
            step = size / float(direction @ product)
            result, residual = result + step * direction, residual - step * product
            size, before = float(residual @ residual), size
            direction = residual + size / before * direction
        return result
