"""Read a network as a chain of layers: what a matching needs to know about it.

`nn.Sequential` is read layer by layer. Other modules are traced (`torch.fx`), and must pass their input through one
layer after another.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.batchnorm import _NormBase

from hansa.models.chain import ACTIVATIONS, LastStep, LayerText
from hansa.plumbing.errors import ConfigError

Step = tuple[LayerText, tuple[str, ...]]  # a layer, and the names of its parameters
_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.LocalResponseNorm, nn.RMSNorm)
_FUNCTIONS: dict[Any, str] = {
    torch.relu: "relu", F.relu: "relu", "relu": "relu", "relu_": "relu", torch.tanh: "tanh", F.tanh: "tanh",
    "tanh": "tanh", torch.sigmoid: "sigmoid", F.sigmoid: "sigmoid", "sigmoid": "sigmoid", F.gelu: "gelu",
    F.elu: "elu", F.silu: "silu", F.leaky_relu: "leaky-relu", F.softplus: "softplus",
}  # fmt: skip

_DEFAULTS = (("stride", None), ("padding", 0), ("dilation", 1), ("ceil_mode", False), ("return_indices", False))


def steps(module: nn.Module) -> list[Step]:
    """The layers of a network in their order; a ConfigError if it is no chain of layers that can be matched."""
    read = list(_steps(module, ""))
    names = [name for _, own in read for name in own]
    parameters = dict(module.named_parameters(remove_duplicate=False))
    if len(set(names)) < len(names) or len({id(p) for p in parameters.values()}) < len(parameters):
        raise ConfigError("the model has layers that share parameters, and shared layers cannot be matched")
    if missing := sorted(set(parameters) - set(names)):
        raise ConfigError(f"the model is no chain of layers: {missing[0]} belongs to no layer of it")
    if frozen := [name for name, parameter in parameters.items() if not parameter.requires_grad]:
        raise ConfigError(f"the model has frozen parameters ({frozen[0]}), and frozen layers cannot be matched")
    return read


def _steps(module: nn.Module, at: str) -> Iterator[Step]:
    if isinstance(module, nn.Sequential):
        for name, child in module.named_children():
            yield from _steps(child, f"{at}{name}.")
    elif isinstance(module, nn.LSTM):
        yield from _lstm(module, at)
    elif (leaf := _leaf(module, at)) is not None:
        names = tuple(f"{at}{name}" for name, _ in module.named_parameters())
        yield leaf, names
    else:
        yield from _traced(module, at)


def _where(module: nn.Module, at: str) -> str:
    return f"{type(module).__name__} ({at.rstrip('.') or 'the model itself'})"


def _leaf(module: nn.Module, at: str) -> LayerText | None:
    """The text of a single layer; None if the module has parts, and a ConfigError if it cannot be matched."""
    if isinstance(module, nn.Linear):
        return LayerText("linear", (module.in_features, module.out_features), _bias(module.bias is not None))
    if isinstance(module, nn.Conv2d):
        if module.groups != 1 or module.padding_mode != "zeros" or isinstance(module.padding, str):
            raise ConfigError(f"the layer {_where(module, at)} has groups, or a padding other than zeros; such a "
                              "convolution cannot be matched")  # fmt: skip
        options = {"kernel": module.kernel_size, "stride": module.stride, "padding": module.padding,
                   "dilation": module.dilation}  # fmt: skip
        own = tuple(sorted((key, (value[0], value[1])) for key, value in options.items()))
        return LayerText("conv", (module.in_channels, module.out_channels), (*_bias(module.bias is not None), *own))
    if isinstance(module, nn.Embedding):
        if module.padding_idx is not None or module.max_norm is not None:
            raise ConfigError(f"the layer {_where(module, at)} has a padding_idx or max_norm; leave them out")
        return LayerText("embedding", (module.num_embeddings, module.embedding_dim))
    if isinstance(module, nn.Dropout):
        return LayerText("dropout", (float(module.p),))
    if isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) == (1, -1):
        return LayerText("flatten")
    if isinstance(module, LastStep):
        return LayerText("last")
    if isinstance(module, nn.AdaptiveAvgPool2d) and _pair(module.output_size) == (1, 1):
        return LayerText("mean")
    if isinstance(module, nn.MaxPool2d) and module.dilation == 1 and not module.ceil_mode:
        return _pool("max-pool", module)
    if isinstance(module, nn.AvgPool2d) and module.count_include_pad and not module.ceil_mode:
        return _pool("avg-pool", module)
    for name, kind in ACTIVATIONS.items():
        plain = module.extra_repr().replace("inplace=True", "").strip(", ")
        if type(module) is kind and plain == kind().extra_repr():
            return LayerText(name)
    if isinstance(module, _NORMS):
        raise ConfigError(
            f"the layer {_where(module, at)} normalises, and a normalisation layer cannot be matched: its statistics "
            "belong to the order and the number of units; use a model without it"
        )
    if not any(True for _ in module.children()):
        raise ConfigError(f"the layer {_where(module, at)} cannot be matched; use a chain of linear layers, "
                          "convolutions, LSTMs, embeddings, pooling and activations")  # fmt: skip
    return None


def _bias(has: bool) -> tuple[tuple[str, tuple[int, int]], ...]:
    return () if has else (("bias", (0, 0)),)


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def _pool(name: str, module: nn.MaxPool2d | nn.AvgPool2d) -> LayerText:
    options = {"kernel": module.kernel_size, "stride": module.stride, "padding": module.padding}
    return LayerText(name, (), tuple(sorted((key, _pair(value)) for key, value in options.items())))


def _lstm(module: nn.LSTM, at: str) -> Iterator[Step]:
    """The layers of an LSTM, one by one."""
    if module.bidirectional or module.proj_size or not module.batch_first:
        raise ConfigError(f"the layer {_where(module, at)} is bidirectional, has projections or no batch_first=True; "
                          "such an LSTM cannot be matched")  # fmt: skip
    inputs = module.input_size
    for layer in range(module.num_layers):
        if layer and module.dropout:
            yield LayerText("dropout", (float(module.dropout),)), ()
        tensors = ("weight_ih", "weight_hh", *(("bias_ih", "bias_hh") if module.bias else ()))
        names = tuple(f"{at}{name}_l{layer}" for name in tensors)
        yield LayerText("lstm", (inputs, module.hidden_size), _bias(module.bias)), names
        inputs = module.hidden_size


def _traced(module: nn.Module, at: str) -> Iterator[Step]:
    """The layers of a module with a `forward` of its own."""
    try:
        graph = fx.Tracer().trace(module)
    except Exception as error:  # the user's own forward: it may branch on its input
        raise ConfigError(
            f"the model is no chain of layers: {_where(module, at)} cannot be traced ({error}); use a model that "
            "passes its input through one layer after another"
        ) from None
    previous: fx.Node | None = None
    for node in graph.nodes:
        if node.op == "placeholder" and previous is None:
            previous = node
            continue
        if _is_shape(node) or (node.op != "output" and not node.users):
            continue
        inputs = [each for each in node.all_input_nodes if not _is_shape(each)]
        if node.op not in ("call_module", "call_function", "call_method", "output") or inputs != [previous]:
            raise ConfigError(
                f"the model is no chain of layers: {node.name!r} in {_where(module, at)} takes more than the result "
                "of the layer before it; use a model that passes its input through one layer after another"
            )
        if node.op == "call_module":
            yield from _steps(module.get_submodule(str(node.target)), f"{at}{node.target}.")
        elif node.op != "output" and (text := _function(node, module, at)) is not None:
            yield text, ()
        previous = node


def _is_shape(node: fx.Node) -> bool:
    """Whether a node gives a size of a tensor and no values."""
    if node.op == "call_method" and node.target in ("size", "dim"):
        return True
    if node.target is getattr and node.args[1] == "shape":
        return True
    return node.target is operator.getitem and isinstance(node.args[0], fx.Node) and _is_shape(node.args[0])


def _function(node: fx.Node, module: nn.Module, at: str) -> LayerText | None:
    """The text of a function in a `forward`; None for the states of an LSTM, which are its first result."""
    rest = node.args[1:]
    options = {key: value for key, value in node.kwargs.items() if key != "inplace" and (key, value) not in _DEFAULTS}
    whole = slice(None, None, None)
    if node.target in _FUNCTIONS and not rest and not options:
        return LayerText(_FUNCTIONS[node.target])
    if node.target in (torch.flatten, "flatten") and (*rest, *options.values()) == (1,):
        return LayerText("flatten")
    if node.target in ("view", "reshape", torch.reshape) and len(rest) == 2 and not options:
        first, second = rest
        if (isinstance(first, fx.Node) and second == -1) or (first == -1 and isinstance(second, int)):
            return LayerText("flatten")
    if node.target is operator.getitem and rest == (0,) and isinstance(_submodule(module, node.args[0]), nn.LSTM):
        return None
    if node.target is operator.getitem and rest in (((whole, -1),), ((whole, -1, whole),)):
        return LayerText("last")
    if node.target in (F.max_pool2d, F.avg_pool2d) and len(rest) == 1 and not options:
        name = "max-pool" if node.target is F.max_pool2d else "avg-pool"
        window = _pair(rest[0])
        return LayerText(name, (), (("kernel", window), ("padding", (0, 0)), ("stride", window)))
    raise ConfigError(
        f"the model is no chain of layers that can be matched: {node.name!r} in {_where(module, at)} is none of the "
        "functions that keep units apart (activations, pooling, flatten)"
    )


def _submodule(module: nn.Module, node: Any) -> nn.Module | None:
    return module.get_submodule(str(node.target)) if node.op == "call_module" else None
