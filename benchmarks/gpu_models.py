"""Milliseconds per round on a GPU for larger models: ResNet-18, a transformer, a character LSTM, low-rank adapters.

    python benchmarks/gpu_models.py [--model resnet18 ...] [--rounds 10] [--precision tf32 bf16] [--compile off on]

Ours is a complete run by `hansa.simulate`; its floor is eager PyTorch, one party after the other, with the same steps.
The table has the median of the rounds after the first three, the extra time of those three (recording, compilation) and
the peak GPU memory. Samples are random, because speed does not depend on them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from gpu_contestants import Laps, allow_tf32
from torch import Tensor, nn

WARM, RATE, LETTERS, WORDS = 3, 0.05, 90, 50257


def resnet18() -> nn.Module:
    """ResNet-18 for images of 32 by 32 (He et al. 2016), with GroupNorm: 11.2 million parameters."""
    from hansa.models.resnet import ResidualBlock

    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.GroupNorm(2, 64), nn.ReLU()]
    before = 64
    for stage, channels in enumerate((64, 128, 256, 512)):
        layers += [ResidualBlock(before, channels, 2 if stage else 1, 2), ResidualBlock(channels, channels, 1, 2)]
        before = channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class Transformer(nn.Module):
    """Tokens to the next token at every position, with causal attention."""

    def __init__(self, words: int, width: int, heads: int, layers: int, length: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(words, width), nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.ModuleList(Attention(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.place
        for block in self.blocks:
            h = block(h)
        scores: Tensor = self.head(self.norm(h))
        return scores


class Attention(nn.Module):
    """A block of attention and a dense layer, each after a LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query: nn.Module = nn.Linear(width, width)
        self.key, self.value = nn.Linear(width, width), nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.dense = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        q, k, v = (layer(h).unflatten(-1, (self.heads, -1)).transpose(-3, -2)
                   for layer in (self.query, self.key, self.value))  # fmt: skip
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(-3, -2).flatten(-2))
        return x + self.dense(self.between(x))


class Adapter(nn.Module):
    """A frozen layer and a trainable product of rank 8 (Hu et al. 2021)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(8, base.in_features) * 0.02)
        self.b = nn.Parameter(torch.zeros(base.out_features, 8))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        return y + x @ self.a.T @ self.b.T


def adapted() -> nn.Module:
    """Adapters at queries and values of a frozen transformer of GPT-2's size, 124 million parameters."""
    model = Transformer(WORDS, 768, 12, 12, 64).requires_grad_(False)
    model.head.weight = model.embed.weight
    for block in model.blocks:
        block.query, block.value = Adapter(block.query), Adapter(block.value)
    return model


def char_lstm() -> nn.Module:
    from hansa.models.char_lstm import CharLstm

    return CharLstm()()


def text(many: int, length: int, words: int) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(0)
    return tuple(torch.randint(0, words, (many, length), generator=draws) for _ in range(2))  # type: ignore[return-value]


def images(many: int) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(0)
    return torch.rand(many, 3, 32, 32, generator=draws), torch.randint(0, 10, (many,), generator=draws)


@dataclass(frozen=True)
class Case:
    """A model and a cohort: all parties train in each round, one epoch."""

    name: str
    model: Callable[[], nn.Module]
    parties: int
    samples: int
    batch: int
    data: Callable[[int], tuple[Tensor, Tensor]]
    classes: int

    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(scores.flatten(0, -2), y.flatten())


CASES = {
    case.name: case
    for case in (
        Case("resnet18", resnet18, 10, 50, 10, images, 10),
        Case(
            "transformer",
            lambda: Transformer(LETTERS, 128, 4, 2, 80),
            20,
            40,
            10,
            lambda n: text(n, 80, LETTERS),
            LETTERS,
        ),
        Case("char-lstm", char_lstm, 20, 40, 10, lambda n: text(n, 80, LETTERS), LETTERS),
        Case("lora", adapted, 10, 16, 4, lambda n: text(n, 64, WORDS), WORDS),
    )
}


def ours(case: Case, rounds: int, precision: str, compile: str) -> list[float]:
    import hansa

    x, y = case.data(case.parties * case.samples)
    offsets = np.arange(0, case.parties * case.samples + 1, case.samples)
    task = hansa.Task(case.model, "cross_entropy", (x, y, offsets), classes=case.classes)
    laps = Laps("cuda")
    hansa.simulate(
        hansa.FedAvg(local=hansa.SGD(lr=RATE, epochs=1, batch=case.batch)), task, rounds=rounds, device="cuda",
        precision=precision, compile=compile, eval_every=rounds, on_round=lambda _: laps(),
    )  # fmt: skip
    return laps.seconds()


def eager(case: Case, rounds: int, precision: str, compile: str) -> list[float]:
    """PyTorch, one party after the other."""
    allow_tf32()
    x, y = (v.cuda() for v in case.data(case.parties * case.samples))
    torch.manual_seed(0)
    net = case.model().cuda()
    parameters = [p for p in net.parameters() if p.requires_grad]
    model = [p.detach().clone() for p in parameters]
    laps = Laps("cuda")
    for _ in range(rounds):
        total = [torch.zeros_like(p) for p in model]
        for k in range(case.parties):
            torch._foreach_copy_([p.data for p in parameters], model)
            order = torch.randperm(case.samples, device="cuda") + k * case.samples
            for rows in order.split(case.batch):
                with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
                    loss = case.loss(net(x[rows]), y[rows])
                gradients = torch.autograd.grad(loss, parameters)
                with torch.no_grad():
                    torch._foreach_add_(parameters, gradients, alpha=-RATE)
            torch._foreach_add_(total, [p.detach() for p in parameters])
        torch._foreach_div_(total, case.parties)
        model = total
        laps()
    return laps.seconds()


def measure(run: Callable[..., list[float]], *given: Any) -> str:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    try:
        seconds = run(*given)
    except Exception as error:
        return f"failed: {type(error).__name__}: {error}".splitlines()[0] + " | | | "
    middle, whole = statistics.median(seconds[WARM:]), time.perf_counter() - began
    peak = torch.cuda.max_memory_reserved() / 2**20
    return f"{1e3 * middle:.1f} | {sum(seconds[:WARM]) - WARM * middle:.1f} | {peak:.0f} | {whole:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--precision", nargs="+", default=["tf32"], choices=("float32", "tf32", "bf16"))
    parser.add_argument("--compile", nargs="+", default=["off"], choices=("off", "on", "auto"))
    parser.add_argument("--no-floor", action="store_true")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no usable GPU here")
    warnings.simplefilter("always")
    print("| model | contestant | precision | ms per round | warm-up, s | peak GPU memory, MB | whole run, s |")
    print("|---|---|---|---|---|---|---|")
    for name in given.model:
        case = CASES[name]
        for precision in given.precision:
            for compile in given.compile:
                found = measure(ours, case, given.rounds + WARM, precision, compile)
                print(f"| {name} | ours, compile={compile} | {precision} | {found} |", flush=True)
            if not given.no_floor:
                found = measure(eager, case, given.rounds + WARM, precision, "off")
                print(f"| {name} | eager, one by one | {precision} | {found} |", flush=True)


if __name__ == "__main__":
    main()
