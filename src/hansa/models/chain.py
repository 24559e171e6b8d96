"""Networks that are a chain of layers, described by texts.

A description needs no code, so it can travel with a model: methods that match neurons make networks of widths that no
party had, and every place can build them. The module is an `nn.Sequential` of PyTorch's own layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from hansa.core.registry import register
from hansa.models.model import Model
from hansa.plumbing.errors import ConfigError

DEEPEST = 1000  # layers
WIDEST = 2**31  # units of a layer
Pair = tuple[int, int]


class LstmStates(nn.LSTM):
    """One LSTM layer that returns its states at all positions, and not its last cell.

    Samples without positions would together be one sequence: the output of a sample would depend on those before it.
    """

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        if x.dim() != 3:
            raise ConfigError(f"layers: lstm takes samples of the shape (positions, values), got {tuple(x.shape[1:])}")
        return super().forward(x)[0]


class LastStep(nn.Module):
    """The last position of a sequence [B, T, D]."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, -1]


class LayerText(NamedTuple):
    """A layer: its name, its sizes (inputs and outputs, or a number), and its options in the order of their names."""

    name: str
    sizes: tuple[float, ...] = ()
    options: tuple[tuple[str, Pair], ...] = ()

    def __str__(self) -> str:
        sizes = [f"{size:g}" if isinstance(size, float) else str(size) for size in self.sizes]
        options = [f"{key}={a}" if a == b else f"{key}={a}x{b}" for key, (a, b) in self.options]
        return " ".join([self.name, *sizes, *options])

    def option(self, key: str, default: int) -> Any:
        """A pair of numbers (height and width); a single number where both are equal."""
        a, b = dict(self.options).get(key, (default, default))
        return a if a == b else (a, b)


def _linear(text: LayerText) -> nn.Module:
    inputs, outputs = text.sizes
    return nn.Linear(inputs, outputs, bias=bool(text.option("bias", 1)))  # type: ignore[arg-type]


def _conv(text: LayerText) -> nn.Module:
    inputs, outputs = text.sizes
    return nn.Conv2d(inputs, outputs, text.option("kernel", 1), text.option("stride", 1), text.option("padding", 0),  # type: ignore[arg-type]
                     text.option("dilation", 1), bias=bool(text.option("bias", 1)))  # fmt: skip


def _pool(layer: type[nn.MaxPool2d] | type[nn.AvgPool2d]) -> Callable[[LayerText], nn.Module]:
    def make(text: LayerText) -> nn.Module:
        kernel = text.option("kernel", 2)
        return layer(kernel, text.option("stride", 0) or kernel, text.option("padding", 0))

    return make


class LayerKind(NamedTuple):
    """How a layer is made, how many sizes it has, and which options."""

    make: Callable[[LayerText], nn.Module]
    sizes: int = 0
    options: frozenset[str] = frozenset()


_WINDOW = frozenset({"kernel", "stride", "padding"})
ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "gelu": nn.GELU, "elu": nn.ELU, "silu": nn.SiLU,
    "leaky-relu": nn.LeakyReLU, "softplus": nn.Softplus, "identity": nn.Identity,
}  # fmt: skip
KINDS: dict[str, LayerKind] = {
    "linear": LayerKind(_linear, 2, frozenset({"bias"})),
    "conv": LayerKind(_conv, 2, _WINDOW | {"dilation", "bias"}),
    "lstm": LayerKind(lambda text: LstmStates(*text.sizes, batch_first=True, bias=bool(text.option("bias", 1))), 2,
                      frozenset({"bias"})),
    "embedding": LayerKind(lambda text: nn.Embedding(*text.sizes), 2),  # type: ignore[arg-type]
    "dropout": LayerKind(lambda text: nn.Dropout(text.sizes[0]), 1),
    "flatten": LayerKind(lambda text: nn.Flatten()),
    "last": LayerKind(lambda text: LastStep()),
    "max-pool": LayerKind(_pool(nn.MaxPool2d), 0, _WINDOW),
    "avg-pool": LayerKind(_pool(nn.AvgPool2d), 0, _WINDOW),
    "mean": LayerKind(lambda text: nn.AdaptiveAvgPool2d(1)),
    **{name: LayerKind(lambda text, layer=layer: layer()) for name, layer in ACTIVATIONS.items()},  # type: ignore[misc]
}  # fmt: skip
UNITS = ("linear", "conv", "lstm", "embedding")  # layers with parameters: their units can be matched


def read_layer(text: str) -> LayerText:
    """Read the text of a layer; a ConfigError if it is invalid."""
    words = text.split()
    kind = KINDS.get(words[0]) if words else None
    if kind is None:
        raise ConfigError(f"layers: {text[:80]!r} is no layer; the layers are {', '.join(KINDS)}")
    sizes = [word for word in words[1:] if "=" not in word]
    if len(sizes) != kind.sizes:
        raise ConfigError(f"layers: {text[:80]!r} has {len(sizes)} sizes, and {words[0]!r} needs {kind.sizes}")
    options = {}
    for word in words[1 + len(sizes) :]:
        key, _, value = word.partition("=")
        low = 0 if key in ("padding", "bias", "stride") else 1
        if key not in kind.options or key in options:
            raise ConfigError(f"layers: {text[:80]!r}: {words[0]!r} takes no option {key!r}")
        first, _, second = value.partition("x")
        options[key] = (_number(first, text, low), _number(second or first, text, low))
    if words[0] == "dropout":
        try:
            rate = float(sizes[0])
        except ValueError:
            rate = -1.0
        if not 0 <= rate < 1:
            raise ConfigError(f"layers: {text[:80]!r}: the rate of a dropout lies in [0, 1)")
        return LayerText("dropout", (rate,))
    return LayerText(words[0], tuple(_number(size, text, 1) for size in sizes), tuple(sorted(options.items())))


def _number(word: str, text: str, low: int) -> int:
    number = int(word) if word.isdecimal() and len(word) <= 10 else -1
    if not low <= number < WIDEST:
        raise ConfigError(f"layers: {text[:80]!r}: {word[:20]!r} is not a whole number from {low} to 2^31 - 1")
    return number


@register("chain")
@dataclass(frozen=True)
class LayerChain(Model):
    """A chain of layers, each a text: `["flatten", "linear 784 100", "relu", "linear 100 10"]`.

    Layers with parameters name their inputs and outputs: `linear 100 10`, `conv 3 32 kernel=5 padding=2`,
    `lstm 8 256`, `embedding 90 8`. `kernel`, `stride`, `padding` and `dilation` are a number, or height and width as
    `3x5`; `bias=0` leaves the bias out. Others are `flatten`, `dropout 0.5`, `max-pool kernel=2`, `avg-pool kernel=2`,
    `mean` (over the image), `last` (position of a sequence), and activations: `relu`, `tanh`, `sigmoid`, `gelu`, `elu`,
    `silu`, `leaky-relu`, `softplus`, `identity`.
    """

    inputs: tuple[int, ...] = (1, 28, 28)
    outputs: int = 10
    layers: tuple[str, ...] = ("flatten", "linear 784 100", "relu", "linear 100 10")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= len(self.layers) <= DEEPEST:
            raise ConfigError(f"layers: a chain has 1 to {DEEPEST} layers, got {len(self.layers)}")
        if not any(read_layer(text).name in UNITS for text in self.layers):
            raise ConfigError(f"layers: a chain needs a layer with parameters: {', '.join(UNITS)}")

    def __call__(self) -> nn.Module:
        return nn.Sequential(*(KINDS[text.name].make(text) for text in map(read_layer, self.layers)))
