# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of short continuations after many prompts that begin alike, from one forward pass.

The prompts' longest common token prefix is computed once. Behind it every prompt's rest is a branch, and behind every
branch each continuation is a twig; a token sees the prefix, its own branch and its own twig, at the positions it would
have alone. So the numbers are those of separate forward passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from verl.utils.selected_logits import selected_logits

__all__ = ["TokenTree", "build_tree", "common_prefix_length", "separate_trees", "supports_trees", "tree_log_probs"]

_PREFIX = -1


@dataclass(frozen=True)
class TokenTree:
    """One episode's prompts and continuations laid out in one row of L tokens.

    token_ids, positions, branch, twig: (L,) int64; branch -1 is the prefix; twig -1 are a branch's own tokens.
    query: (K,) int64 columns whose next-token distribution is needed; target: (K,) int64 that next token;
    prompt, continuation: (K,) int64, what the k-th log-probability counts for.
    shape: (prompts, continuations).
    """

    token_ids: np.ndarray
    positions: np.ndarray
    branch: np.ndarray
    twig: np.ndarray
    query: np.ndarray
    target: np.ndarray
    prompt: np.ndarray
    continuation: np.ndarray
    shape: tuple[int, int]

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_chain(self) -> bool:
        """One prompt and nothing beside its trunk: plain causal attention is the same."""
        return self.shape[0] == 1 and bool((self.twig == -1).all())

    def attention(self) -> np.ndarray:
        """(L, L) bool, [t, u] whether token t sees token u."""
        causal = np.tri(len(self), dtype=bool)
        same_branch = self.branch[:, None] == self.branch[None, :]
        same_twig = (self.twig[None, :] == -1) | (self.twig[:, None] == self.twig[None, :])
        return causal & ((self.branch[None, :] == _PREFIX) | (same_branch & same_twig))


def common_prefix_length(sequences: Sequence[Sequence[int]]) -> int:
    """Tokens that all sequences begin with, at most one less than the shortest has."""
    # Everything between the smallest and the largest sequence in dictionary order begins like both of them.
    first, last = min(map(tuple, sequences)), max(map(tuple, sequences))
    limit = min(map(len, sequences)) - 1
    for index in range(limit):
        if first[index] != last[index]:
            return index
    return limit


def build_tree(prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]]) -> TokenTree:
    """Lay out N prompts with C continuations each behind the prompts' common prefix.

    Raises:
        ValueError: an empty prompt or continuation.
    """
    if not prompts or not all(map(len, prompts)) or not continuations or not all(map(len, continuations)):
        raise ValueError("prompts and continuations must not be empty")
    shared = common_prefix_length(prompts)
    ids: list[int] = list(prompts[0][:shared])
    positions = list(range(shared))
    branch, twig = [_PREFIX] * shared, [-1] * shared
    queries: list[tuple[int, int, int, int]] = []
    for number, prompt in enumerate(prompts):
        rest = prompt[shared:]
        ids += rest
        positions += range(shared, len(prompt))
        branch += [number] * len(rest)
        twig += [-1] * len(rest)
        trunk_end = len(ids) - 1
        for label, continuation in enumerate(continuations):
            queries.append((trunk_end, continuation[0], number, label))
            for depth, token in enumerate(continuation[:-1]):
                ids.append(token)
                positions.append(len(prompt) + depth)
                branch.append(number)
                twig.append(label)
                queries.append((len(ids) - 1, continuation[depth + 1], number, label))
    query, target, number_of, label_of = np.array(queries, dtype=np.int64).T
    return TokenTree(
        token_ids=np.array(ids, dtype=np.int64),
        positions=np.array(positions, dtype=np.int64),
        branch=np.array(branch, dtype=np.int64),
        twig=np.array(twig, dtype=np.int64),
        query=query,
        target=target,
        prompt=number_of,
        continuation=label_of,
        shape=(len(prompts), len(continuations)),
    )


def separate_trees(prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]]) -> list[TokenTree]:
    """One tree per pair: nothing shared, plain causal rows; in order of prompts, then continuations."""
    return [build_tree([prompt], [continuation]) for prompt in prompts for continuation in continuations]


def supports_trees(model: Any) -> bool:
    """Whether the model's attention takes an arbitrary mask: SDPA or eager, full attention in every layer."""
    config = model.config
    layers = config.to_dict().get("layer_types") or ()
    return config._attn_implementation in ("sdpa", "eager") and all(kind == "full_attention" for kind in layers)


def tree_log_probs(
    model: nn.Module, trees: Sequence[TokenTree], *, pad_token_id: int, device: torch.device
) -> list[np.ndarray]:
    """Log-probability of every continuation after every prompt, from one forward pass over a batch of trees.

    Returns:
        One (N, C) float64 array per tree: summed log-probabilities of the continuation's tokens.
    """
    width = max(map(len, trees))
    ids = np.full((len(trees), width), pad_token_id, dtype=np.int64)
    positions = np.zeros_like(ids)
    for row, tree in enumerate(trees):
        ids[row, : len(tree)] = tree.token_ids
        positions[row, : len(tree)] = tree.positions
    forward_args: dict[str, torch.Tensor] = {}
    if not all(tree.is_chain for tree in trees):
        forward_args = {
            "attention_mask": _mask(model, trees, width, device),
            "position_ids": torch.from_numpy(positions).to(device),
        }
    counts = [len(tree.query) for tree in trees]
    rows = torch.from_numpy(np.repeat(np.arange(len(trees)), counts)).to(device)
    columns = torch.from_numpy(np.concatenate([tree.query for tree in trees])).to(device)
    targets = torch.from_numpy(np.concatenate([tree.target for tree in trees])).to(device)
    with torch.no_grad():
        logits = selected_logits(model, torch.from_numpy(ids).to(device), rows, columns, **forward_args).float()
        chosen = logits.gather(1, targets.unsqueeze(1)).squeeze(1) - torch.logsumexp(logits, dim=1)
    values = np.split(chosen.double().cpu().numpy(), np.cumsum(counts)[:-1])
    return [_collect(tree, value) for tree, value in zip(trees, values)]


def _collect(tree: TokenTree, values: np.ndarray) -> np.ndarray:
    sums = np.zeros(tree.shape)
    np.add.at(sums, (tree.prompt, tree.continuation), values)
    return sums


def _mask(model: Any, trees: Sequence[TokenTree], width: int, device: torch.device) -> torch.Tensor:
    """(B, 1, L, L) mask in the form the attention implementation takes: bool for SDPA, additive for eager."""
    # Padding sees only itself: a row that sees nothing would be NaN.
    allowed = torch.eye(width, dtype=torch.bool).repeat(len(trees), 1, 1)
    for row, tree in enumerate(trees):
        allowed[row, : len(tree), : len(tree)] = torch.from_numpy(tree.attention())
    allowed = allowed.unsqueeze(1).to(device)
    if model.config._attn_implementation == "sdpa":
        return allowed
    dtype = next(model.parameters()).dtype
    return torch.zeros(allowed.shape, dtype=dtype, device=device).masked_fill_(~allowed, torch.finfo(dtype).min)
