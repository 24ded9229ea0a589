"""Weights of a model on a CPU, in the layout that bf16 products read.

A product of bf16 matrices begins by copying its weights into blocks of that layout, which for the few rows of a decode
step takes as long as the product. Here that is done once, when a model is loaded; the values, and so all results, are
the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

ROWS = 16
"""Rows of a product that the layout is chosen for: those of a decode step."""
READ_BY_METHODS = "o_proj"
"""Its weights stay as they were besides: methods read them to weigh values."""


class PackedLinear(nn.Module):
    """A linear layer for inference: its product has no gradient."""

    def __init__(self, linear: nn.Linear, keeps_weight: bool = False) -> None:
        super().__init__()
        self.weight = linear.weight if keeps_weight else None
        self.bias = linear.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS)

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return product


def pack_linears(model: Any) -> None:
    """Replace the linear layers of a bf16 model on a CPU whose weights nothing else shares."""
    embedding = model.get_input_embeddings().weight
    if embedding.device.type != "cpu" or embedding.dtype != torch.bfloat16:
        return
    if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear and child.weight is not embedding:
                setattr(parent, name, PackedLinear(child, keeps_weight=name == READ_BY_METHODS))
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # out of the mapped file, which would stay resident beside the copies
