"""Layers that draw random numbers or mix the rows of a batch, in every engine."""

import copy

import pytest
import torch
from torch import Tensor, nn

import hansa

SIZES = (7, 12, 9, 4)


class Centred(nn.Module):
    """Subtracts the mean of the batch: a sample's output depends on the other rows."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Noisy(nn.Module):
    """Adds noise whose shape is given by keyword."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn(size=(x.shape[0], x.shape[1]), dtype=x.dtype)


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x.unflatten(1, (-1, 8))).mean(1))


def centred() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 6), Centred(), nn.ReLU(), nn.Linear(6, 3)).double()


def instance_norm() -> nn.Module:
    norm = nn.InstanceNorm1d(2, affine=True, track_running_stats=True)
    return nn.Sequential(nn.Unflatten(1, (2, 8)), norm, nn.Flatten(), nn.Linear(16, 3)).double()


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).double()


def noisy() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 6), Noisy(), nn.ReLU(), nn.Linear(6, 3)).double()


def attentive() -> nn.Module:
    return Attentive().double()


def task(model: object) -> hansa.Task:
    draws = torch.Generator().manual_seed(4)
    parties = [
        (torch.randn(n, 16, generator=draws, dtype=torch.float64), torch.randint(0, 3, (n,), generator=draws))
        for n in SIZES
    ]
    return hansa.Task(model, "cross_entropy", parties)  # type: ignore[arg-type]


def train(model: object, engine: str, batch: int = 5) -> hansa.Result:
    return hansa.simulate(hansa.FedAvg(local=hansa.SGD(batch=batch, epochs=2)), task(model), rounds=2, engine=engine)


@pytest.mark.thin(2)
@pytest.mark.parametrize("model", [centred, instance_norm, batch_norm, noisy, attentive])
def test_engines_agree_on_layers_that_mix_rows_or_draw(model: object) -> None:
    reference, stacked = train(model, "reference"), train(model, "stacked")
    for name, value in reference.params.items():
        torch.testing.assert_close(stacked.params[name], value, rtol=0, atol=1e-9)


@pytest.mark.thin(2)
@pytest.mark.parametrize("model", [noisy, attentive])
@pytest.mark.parametrize("engine", ["reference", "stacked"])
def test_what_a_layer_draws_does_not_depend_on_the_global_generator(model: object, engine: str) -> None:
    torch.manual_seed(1)
    first = train(model, engine).params
    torch.manual_seed(2)
    again = train(model, engine).params
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_attention_without_dropout_is_pytorchs_own() -> None:
    torch.manual_seed(0)
    model = Attentive().double()
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    model.layer.self_attn.dropout = 0.0
    x, y = torch.randn(4, 16, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    twin = copy.deepcopy(model)
    loss = nn.functional.cross_entropy(twin(x), y)
    loss.backward()
    given = hansa.Task(lambda: copy.deepcopy(model), "cross_entropy", [(x, y)])
    done = hansa.simulate(hansa.FedSGD(server=hansa.Descent(lr=1.0)), given, rounds=1, engine="reference")
    for name, parameter in twin.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(done.params[name], (parameter - parameter.grad).detach(), rtol=0, atol=1e-12)
