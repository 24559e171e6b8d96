from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hansa.numerics.params import Params, ParamSpec
from hansa.plumbing.errors import ConfigError


class Tied(nn.Module):
    """A model whose embedding and output layer share one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.out = nn.Linear(3, 5)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.embed(x))
        return y


class Mixed(nn.Module):
    """A trainable and a frozen parameter, and buffers of several types; one buffer is not in the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3))
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.register_buffer("running", torch.randn(3))
        self.register_buffer("precise", torch.randn(2, dtype=torch.float64))
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("scratch", torch.randn(9), persistent=False)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(3, 2),
    "norms": lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.LazyLinear(1)),
    "float64": lambda: nn.Linear(2, 2).double(),
    "tied": Tied,
    "mixed": Mixed,
}


def made(name: str) -> nn.Module:
    module = MODELS[name]()
    if name == "norms":
        module(torch.zeros(2, 1, 5, 5))
    return module


@pytest.mark.parametrize("name", MODELS)
def test_a_module_comes_back_from_its_vectors(name: str) -> None:
    first, second = made(name), made(name)
    spec = ParamSpec.of(first)
    for parameter in second.parameters():
        parameter.data += 1.0
    before = second.state_dict()["frozen"].clone() if name == "mixed" else None
    spec.load(second, spec.flatten(first))
    for key, value in first.state_dict().items():
        back = second.state_dict()[key]
        if key == "frozen":
            assert torch.equal(back, before)
            continue
        assert back.dtype == value.dtype
        assert torch.equal(back, value), key


@pytest.mark.parametrize("name", MODELS)
def test_named_tensors_are_those_of_the_module(name: str) -> None:
    module = made(name)
    spec = ParamSpec.of(module)
    named = spec.named(spec.flatten(module))
    state = module.state_dict()
    assert set(named) <= set(state)
    for key, value in named.items():
        assert value.dtype == state[key].dtype
        assert torch.equal(value, state[key]), key


@pytest.mark.parametrize("name", ["linear", "norms", "float64", "tied"])
def test_named_tensors_are_views_of_the_vectors(name: str) -> None:
    module = made(name)
    spec = ParamSpec.of(module)
    params = spec.flatten(module)
    spans = {v.untyped_storage().data_ptr() for v in params if v.numel()}
    for tensor in spec.named(params).values():
        assert tensor.untyped_storage().data_ptr() in spans
    spec.named(params)[spec.weights[0].name].fill_(3.5)
    assert torch.equal(params.w[: spec.weights[0].numel], torch.full((spec.weights[0].numel,), 3.5))


def test_flatten_copies_so_that_the_module_is_left_alone() -> None:
    module = nn.Linear(2, 2)
    before = module.weight.detach().clone()
    ParamSpec.of(module).flatten(module).w.zero_()
    assert torch.equal(module.weight, before)


def test_tied_weights_count_once_and_stay_tied() -> None:
    module = Tied()
    spec = ParamSpec.of(module)
    assert spec.dim == 5 * 3 + 5
    assert len(spec.weights) == 2
    spec.load(module, Params(torch.arange(20.0), torch.zeros(0), torch.zeros(0, dtype=torch.int64)))
    assert module.out.weight is module.embed.weight
    assert torch.equal(module.out.weight, torch.arange(15.0).view(5, 3))


def test_each_tensor_goes_to_the_vector_of_its_group() -> None:
    spec = ParamSpec.of(Mixed())
    assert [e.name for e in spec.weights] == ["weight"]
    assert {e.name for e in spec.stats} == {"running", "precise"}
    assert {e.name for e in spec.counts} == {"steps", "flags"}
    assert [e.name for e in spec.frozen] == ["frozen"]
    params = spec.flatten(Mixed())
    assert params.w.dtype == torch.float32
    assert params.stats.dtype == torch.float64  # as wide as its widest member: nothing is lost
    assert params.counts.dtype == torch.int64
    assert (params.w.numel(), params.stats.numel(), params.counts.numel()) == (6, 5, 3)


def test_batch_norm_statistics_are_no_weights() -> None:
    spec = ParamSpec.of(nn.BatchNorm1d(3))
    assert spec.dim == 6
    assert [e.name for e in spec.stats] == ["running_mean", "running_var"]
    assert [e.name for e in spec.counts] == ["num_batches_tracked"]


def test_a_model_of_two_types_is_refused() -> None:
    with pytest.raises(ConfigError, match="several types"):
        ParamSpec.of(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1).double()))


def test_a_complex_parameter_is_refused_by_name() -> None:
    module = nn.Module()
    module.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ConfigError, match="phase is sparse or complex"):
        ParamSpec.of(module)


@pytest.mark.parametrize("make", [Tied, Mixed])
def test_a_module_that_shares_a_vector_keeps_its_values_and_no_copy(make: Callable[[], nn.Module]) -> None:
    module = make()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    spec = ParamSpec.of(module)
    params = spec.flatten(module)
    spec.share(module, params)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    trained = {entry.name for entry in spec.weights}
    shared = {name for name, parameter in module.named_parameters()
              if parameter.untyped_storage().data_ptr() == params.w.untyped_storage().data_ptr()}  # fmt: skip
    assert shared == trained
