# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of training steps, for the model FLOPs utilisation (MFU) that is logged.

Per token ``6 N + 12 L H Q T`` (PaLM, arXiv 2204.02311, appendix B): N weights in matrix products, L layers with H heads
of size Q, T tokens of the row. Recomputed activations and the causal half of attention are not taken off, as usual.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache

import torch
from transformers import PretrainedConfig

__all__ = ["FlopsCounter", "device_peak_flops"]

# Dense bfloat16 peaks in FLOP/s by a part of the device's name (vendors' data sheets), longer names first.
_PEAKS = {
    "GH200": 989e12,
    "H200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "H20": 148e12,
    "L40": 181e12,
    "L20": 119.5e12,
    "B200": 2250e12,
    "4090": 165e12,
}
_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")


@cache
def device_peak_flops(device: torch.device) -> float | None:
    """FLOP/s that a device can reach: the data sheet's bfloat16 figure on CUDA (None for a device not listed).

    On the CPU: measured once per process, a float32 matrix product with the process' threads.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        return next((peak for part, peak in _PEAKS.items() if part in name), None)
    size = 512
    matrix = torch.ones(size, size)
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        matrix @ matrix
        best = min(best, time.perf_counter() - start)
    return 2.0 * size**3 / best


class FlopsCounter:
    """Operations of a dense decoder, from its configuration.

    Args:
        config: Hugging Face configuration; a model with experts, or without the usual size fields, counts 0.
        vocabulary_head: False for a value model, whose head is negligible.
        frozen: only adapters train, so no gradients of the weights are computed: 4 N instead of 6 N.
    """

    def __init__(self, config: PretrainedConfig, *, vocabulary_head: bool = True, frozen: bool = False) -> None:
        sizes = config.to_dict()
        self._per_token = 0.0
        self._per_token_pair = 0.0
        if all(isinstance(sizes.get(name), int) for name in _NEEDED) and not sizes.get("num_experts"):
            hidden, layers, heads = sizes["hidden_size"], sizes["num_hidden_layers"], sizes["num_attention_heads"]
            size = sizes.get("head_dim") or hidden // heads
            kv_heads = sizes.get("num_key_value_heads") or heads
            attention = hidden * size * (2 * heads + 2 * kv_heads)
            weights = layers * (attention + 3 * hidden * sizes["intermediate_size"])
            if vocabulary_head:
                weights += hidden * sizes["vocab_size"]
            self._per_token = (4.0 if frozen else 6.0) * weights
            self._per_token_pair = 12.0 * layers * heads * size

    def estimate_flops(self, batch_seqlens: Sequence[int], delta_time: float) -> tuple[float, float]:
        """Achieved TFLOP/s of one forward and backward pass over rows, and the default device's peak TFLOP/s.

        Args:
            batch_seqlens: tokens of each row.
            delta_time: seconds the pass took.
        """
        tokens = float(sum(batch_seqlens))
        pairs = float(sum(length * length for length in batch_seqlens))
        achieved = (self._per_token * tokens + self._per_token_pair * pairs) / delta_time / 1e12
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return achieved, (device_peak_flops(device) or float("inf")) / 1e12
