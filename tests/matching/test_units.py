"""Networks as layers of units: reading, writing, permuting and resizing keep the function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hansa.core.plain_data import from_config, to_config
from hansa.matching.units import Network, permuted
from hansa.models import CharLstm, Cnn, LayerChain, Logistic, ResNetGn, TwoNN
from hansa.models.chain import LayerText, read_layer
from hansa.plumbing.errors import ConfigError


class Written(nn.Module):
    """A network whose forward pass is written out."""

    def __init__(self, view: str = "flatten") -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, padding=1, bias=False)
        self.inner = nn.Sequential(nn.Conv2d(3, 5, (3, 1), stride=(1, 2)), nn.Tanh())
        self.fc = nn.Linear(5 * 2 * 2, 6)
        self.out = nn.Linear(6, 4)
        self.view = view

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(F.max_pool2d(torch.relu(self.conv(x)), 2))
        x = torch.flatten(x, 1) if self.view == "flatten" else x.view(x.size(0), -1)
        return self.out(F.relu(self.fc(x)))


class LastState(nn.Module):
    """A two-layer LSTM that predicts from its last state, as LEAF's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.lstm = nn.LSTM(4, 5, 2, batch_first=True)
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(self.embed(x))
        return self.out(states[:, -1])


IMAGE, CODES = (1, 8, 8), (6,)
NETWORKS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (Logistic(IMAGE, 4)(), IMAGE),
    "2nn": (TwoNN(IMAGE, 4, hidden=7)(), IMAGE),
    "cnn": (Cnn(IMAGE, 4)(), IMAGE),
    "written": (Written(), IMAGE),
    "view": (Written("view"), IMAGE),
    "char-lstm": (CharLstm(CODES, 9, embed=3, hidden=5)(), CODES),
    "last state": (LastState(), CODES),
    "flattened": (LayerChain(CODES, 2, ("embedding 9 4", "flatten", "linear 24 5", "relu", "linear 5 2"))(), CODES),
    "mean": (LayerChain(IMAGE, 3, ("conv 1 4 kernel=3", "elu", "mean", "flatten", "linear 4 3"))(), IMAGE),
}  # fmt: skip


def samples(shape: tuple[int, ...]) -> Tensor:
    draws = torch.Generator().manual_seed(0)
    return torch.randn(5, *shape, generator=draws) if shape == IMAGE else torch.randint(9, (5, *shape), generator=draws)


def tensors(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in module.named_parameters()}


def outputs(network: Network, shape: tuple[int, ...], named: dict[str, Tensor]) -> Tensor:
    module = network.chain(shape)()
    module.load_state_dict(named)
    return module.double()(samples(shape).double() if shape == IMAGE else samples(shape)).detach()


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_is_rebuilt_from_its_chain_and_its_units(name: str) -> None:
    module, shape = NETWORKS[name]
    network = Network.of(module)
    units = network.read(tensors(module))
    again = network.write(units)
    assert all(torch.equal(again[key], value) for key, value in tensors(module).items())
    same = network.resized(network.widths)
    x = samples(shape)
    chain = same.chain(shape)()
    chain.load_state_dict(same.write(units))
    assert torch.equal(chain(x), module(x))
    assert Network.of(chain).texts == network.texts and network.like(Network.of(chain))
    assert Network.of_texts(same.chain(shape).layers) == same
    assert from_config("model", to_config(same.chain(shape)), "test") == same.chain(shape)


@pytest.mark.parametrize("name", NETWORKS)
def test_permuting_hidden_units_keeps_the_function(name: str) -> None:
    module, shape = NETWORKS[name]
    network = Network.of(module)
    units = network.read(tensors(module))
    orders = [torch.randperm(width, generator=torch.Generator().manual_seed(width)) for width in network.widths]
    other = network.resized(network.widths)
    expected = outputs(other, shape, other.write(units))
    found = outputs(other, shape, other.write(permuted(units, orders)))
    assert torch.allclose(found, expected, atol=1e-12)
    for k in range(len(orders)):  # a layer permuted without the one above it computes something else
        wrong = list(units)
        wrong[k] = units[k].taken(orders[k])
        assert not torch.allclose(outputs(other, shape, other.write(wrong)), expected, atol=1e-3)


@pytest.mark.parametrize("name", NETWORKS)
def test_units_without_outgoing_weights_change_nothing(name: str) -> None:
    module, shape = NETWORKS[name]
    network = Network.of(module)
    units = network.read(tensors(module))
    wide, places = network.resized([width + 2 for width in network.widths]), []
    drawn = wide.read(tensors(wide.chain(shape)()))
    layers, below = [], None
    for own, more, width in zip(units, drawn, (*network.widths, network.outputs), strict=True):
        layer = own if below is None else own.above(below, len(below) + 2)
        place = torch.arange(width) + (len(layers) % 2)
        if len(layers) < len(network.widths):
            incoming, bias, recurrent = more.incoming.clone(), more.bias.clone(), more.recurrent.clone()
            incoming[place], bias[place] = layer.incoming, layer.bias
            recurrent[place] = 0
            recurrent[place[:, None], place] = layer.recurrent
            layer = type(layer)(incoming, bias, recurrent)
        layers.append(layer)
        below = place
        places.append(place)
    base = network.resized(network.widths)
    expected = outputs(base, shape, base.write(units))
    assert torch.allclose(outputs(wide, shape, wide.write(layers)), expected, atol=1e-12)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        return x + self.second(x)


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) if x.sum() > 0 else self.fc(-x)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.relu(self.fc(x)))


def frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    module[0].weight.requires_grad_(False)
    return module


@pytest.mark.parametrize(("module", "reason"), [
    (Residual(), "no chain of layers: 'add' in Residual"),
    (ResNetGn((1, 8, 8), 2, width=4)(), r"GroupNorm \(1\) normalises, and a normalisation layer cannot be matched"),
    (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), r"BatchNorm1d \(1\) normalises"),
    (nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)), r"LayerNorm \(1\) normalises"),
    (Branch(), "no chain of layers: Branch .* cannot be traced"),
    (Tied(), "share parameters"),
    (frozen(), r"frozen parameters \(0.weight\)"),
    (nn.Sequential(nn.Conv2d(4, 4, 3, groups=4)), r"Conv2d \(0\) has groups"),
    (nn.Sequential(nn.Linear(4, 4), nn.Softmax(1)), r"Softmax \(1\) cannot be matched"),
    (nn.Sequential(nn.LSTM(4, 4, bidirectional=True)), "is bidirectional"),
    (nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(6, 2)), "takes 6 inputs from 4 units below"),
    (nn.ReLU(), "no layer with parameters"),
])  # fmt: skip
def test_a_model_that_cannot_be_matched_is_named_with_the_layer(module: nn.Module, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Network.of(module)


@pytest.mark.parametrize("text", ["", "linear 3", "linear 3 0", "linear 3 4 kernel=3", "conv 1 2 kernel=a", "dropout 2",
                                  "exec 1 2", "linear 99999999999 2", "linear -3 2",
                                  "conv 1 2 kernel=3 kernel=5"])  # fmt: skip
def test_an_invalid_layer_is_one_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match="layers: "):
        LayerChain((4,), 2, (text,))


def test_texts_of_layers_are_read_back() -> None:
    for text in (
        "conv 3 32 kernel=5 padding=2",
        "linear 784 10 bias=0",
        "dropout 0.25",
        "max-pool kernel=3x1 stride=2",
    ):
        assert str(read_layer(text)) == text
    assert read_layer("conv 3 32 kernel=3x5") == LayerText("conv", (3, 32), (("kernel", (3, 5)),))
    module: Any = LayerChain((3, 8, 8), 2, ("conv 3 4 kernel=3x5 stride=2 bias=0", "mean", "flatten", "linear 4 2"))()
    assert module[0].kernel_size == (3, 5) and module[0].stride == (2, 2) and module[0].bias is None
    with pytest.raises(ConfigError, match="needs a layer with parameters"):
        LayerChain((4,), 3, ("relu",))
