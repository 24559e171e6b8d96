"""The model on its way to the parties, packed by a transform.

The aggregator packs the vector of a model and goes on with what the parties will open: all checks, engines and methods
see one and the same payload. Only messages have the packed form.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hansa.core.op import Payload
from hansa.core.plain_data import from_config, to_config
from hansa.plumbing.errors import DataError
from hansa.replies.reply_checks import message_fault
from hansa.transforms.transform import Transform


def model_vector(payload: Payload) -> Tensor | None:
    """The vector of the model in a payload; None if there is none, or an empty one."""
    model = payload.get("model")
    vector = model.get("w") if isinstance(model, Mapping) else None
    return vector if isinstance(vector, Tensor) and vector.numel() else None


def with_vector(payload: Payload, vector: Tensor) -> dict[str, Any]:
    """The payload with another vector of the model."""
    return {**payload, "model": {**payload["model"], "w": vector}}


def packed_form(transform: Transform, parts: Mapping[str, Tensor], length: int) -> dict[str, Any]:
    """A packed vector as part of a message."""
    return {"transform": to_config(transform), "parts": dict(parts), "length": length}


def transform_of(form: Any) -> Transform:
    """The transform of a packed vector in a message; a DataError if the message is malformed."""
    if not isinstance(form, Mapping) or not isinstance(form.get("transform"), Mapping):
        raise DataError("malformed message: its model names no transform")
    transform = from_config("transform", form["transform"], "the packed model")
    assert isinstance(transform, Transform)
    return transform


def opened_payload(message: Mapping[str, Any], most: int, dtype: torch.dtype) -> Payload:
    """The payload of a message to a party whose model has `most` numbers, with its model opened.

    The sender is not trusted: a longer vector and parts of another form raise a DataError before anything is opened.
    """
    payload: Payload = message["payload"]
    form = message.get("packed")
    if form is None:
        return payload
    transform, length, parts = transform_of(form), form.get("length"), form.get("parts")
    if isinstance(length, bool) or not isinstance(length, int) or not 0 <= length <= most:
        raise DataError(f"the packed model has {length!r:.40} numbers, and the party's model has {most}")
    if not isinstance(parts, Mapping) or not all(isinstance(part, Tensor) for part in parts.values()):
        raise DataError("malformed message: the parts of its model are not tensors")
    shape = ((length,), dtype)
    reason = message_fault(parts, transform.packed(shape))
    if reason is not None:
        raise DataError(f"the packed model cannot be opened: {reason}")
    if not isinstance(payload.get("model"), Mapping):
        raise DataError("malformed message: it has a packed vector and no model")
    return with_vector(payload, transform.open(parts, shape))
