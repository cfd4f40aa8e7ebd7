"""Tensors as clients send them."""

import base64
import io
from typing import Any

import torch


def saved(value: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def sent(value: Any, **options: Any) -> str:
    """Return the base64 of torch.save's output."""
    return base64.b64encode(saved(value, **options)).decode()
