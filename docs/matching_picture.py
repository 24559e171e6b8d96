"""Draw the picture of the page on matching: `python docs/matching_picture.py` writes docs/images/matching.png.

Two parties train a small network on their own samples of a curve. The second one starts from the first one's network
with its units in another order, as if it had come to the same solution by itself. Then their weights are averaged place
by place, and after a matching.
"""

from __future__ import annotations

from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from hansa.matching import Process, match
from hansa.matching.fedma import class_mean, owners_mean
from hansa.matching.units import Network, Units, permuted

IMAGES = Path(__file__).resolve().parent / "images"
UNITS = 8
ORDER = torch.tensor([5, 2, 7, 0, 3, 6, 1, 4])


def curve(x: Tensor) -> Tensor:
    return torch.sin(3 * x) + 0.5 * x


def trained(layers: list[Units] | None, network: Network, seed: int) -> list[Units]:
    """A network fitted to a party's samples of the curve, from given layers or from random ones."""
    torch.manual_seed(seed)
    x = torch.rand(200, 1) * 4 - 2
    y = curve(x) + 0.1 * torch.randn(200, 1)
    chain = network.chain((1,))()
    if layers is not None:
        chain.load_state_dict(network.write(layers))
    optimiser = torch.optim.Adam(chain.parameters(), lr=0.02)
    for _ in range(3000 if layers is None else 200):
        optimiser.zero_grad()
        (chain(x) - y).square().mean().backward()
        optimiser.step()
    return network.read({name: value.detach() for name, value in chain.named_parameters()})


def shown(layers: list[Units]) -> Tensor:
    """The weights of a network as a table: a row for each hidden unit (input, bias, output)."""
    first, second = layers
    return torch.cat([first.atoms, second.incoming[:, :, 0].t()], 1)


def main() -> None:
    module = nn.Sequential(nn.Linear(1, UNITS), nn.Tanh(), nn.Linear(UNITS, 1))
    network = Network.of(module).resized([UNITS])
    first = trained(None, network, 0)
    second = trained(permuted(first, [ORDER]), network, 1)
    averaged = [
        Units(*((a + b) / 2 for a, b in zip(*layers, strict=True))) for layers in zip(first, second, strict=True)
    ]
    found = match([first[0].atoms, second[0].atoms], Process(sigma=0.1, sigma0=10.0))
    count = len(found.atoms)
    halves = [torch.full((1,), 0.5, dtype=torch.float64)] * 2
    above = [layers[1].above(place, count) for layers, place in zip((first, second), found.places, strict=True)]
    matched = [owners_mean([first[0], second[0]], found.places, count), class_mean(above, halves)]
    cases = {
        "party 1": first,
        "party 2: other order": second,
        "mean of the weights": averaged,
        "matched, then mean": matched,
    }
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    x = torch.linspace(-2, 2, 200)[:, None]
    for panel, (title, layers) in enumerate(cases.items(), 1):
        top = figure.add_subplot(2, 4, panel)
        top.imshow(shown(layers), cmap="RdBu", vmin=-3, vmax=3, aspect="auto")
        top.set(title=title, xticks=range(3), xticklabels=["input", "bias", "output"], yticks=[])
        top.set_ylabel("hidden units" if panel == 1 else "")
        chain = network.resized([len(layers[0].bias)]).chain((1,))()
        chain.load_state_dict(network.resized([len(layers[0].bias)]).write(layers))
        low = figure.add_subplot(2, 4, panel + 4)
        low.plot(x[:, 0], curve(x)[:, 0], color="0.7", lw=4, label="true curve")
        low.plot(x[:, 0], chain(x).detach()[:, 0], "k", lw=1.2, label="network")
        low.set(ylim=(-2.6, 2.6), xlabel="x")
        if panel == 1:
            low.legend(fontsize=8, loc="upper left")
    figure.savefig(IMAGES / "matching.png", dpi=120)


if __name__ == "__main__":
    main()
