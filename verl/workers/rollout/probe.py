# SPDX-License-Identifier: Apache-2.0
"""Are the engine's weights the policy's? A few fixed tokens, scored by both sides, tell.

A weight that never reaches the engine looks like slow learning, not like an error. So every sync ends with the
log-probabilities of one short prompt; when they differ, the outputs of the layers say where the difference begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from verl.protocol import DataProto

__all__ = [
    "PROBE_LENGTH",
    "PolicyProbe",
    "StaleWeightsError",
    "first_stale_group",
    "layer_groups",
    "probe_tokens",
    "probe_tolerance",
    "record_states",
    "scores_of_next_tokens",
]

PROBE_LENGTH = 16

# Mean absolute difference of log-probabilities between two implementations of one model, with a wide margin: float32
# differs by 1e-6 to 1e-5, bfloat16 rounds a logit of 16 by up to 0.06 in each of them.
_LOG_PROB_TOLERANCE = {torch.float32: 5e-4, torch.float16: 3e-2, torch.bfloat16: 0.25}
# Relative difference (Euclidean norm) of a layer's outputs.
_STATE_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}

_FSDP1_PART = "_fsdp_wrapped_module."
HEAD = "the output head"
UNKNOWN = "a part that this engine does not show (rollout.enforce_eager=True would)"


class StaleWeightsError(RuntimeError):
    """The engine does not compute with the weights that it was given."""


def probe_tokens(vocab_size: int) -> Tensor:
    """``(PROBE_LENGTH,)`` int64 token ids, the same ones every time, spread over the vocabulary."""
    # Multiples of a fraction near the golden ratio cover the range evenly for any size of vocabulary.
    step = max(1, int(vocab_size * 0.6180339887))
    return (torch.arange(1, PROBE_LENGTH + 1, dtype=torch.int64) * step) % vocab_size


def probe_tolerance(*dtypes: torch.dtype) -> float:
    """Allowed mean absolute difference of log-probabilities when weights or computation have these types."""
    return max(_LOG_PROB_TOLERANCE[dtype] for dtype in dtypes)


def scores_of_next_tokens(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probability of every token after the first: logits ``(N, V)``, tokens ``(N,)`` -> ``(N - 1,)`` float32."""
    log_probs = torch.log_softmax(logits[:-1].float(), dim=-1)
    return log_probs.gather(1, tokens[1:, None].to(logits.device)).squeeze(1).cpu()


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    """Modules by the plain model's names; of a module and its FSDP1 wrapper, the module."""
    return {f"{name}.".replace(_FSDP1_PART, "").removesuffix("."): module for name, module in model.named_modules()}


def layer_groups(model: nn.Module) -> tuple[str, ...]:
    """Names of the parts that a token passes on its way to the head: embeddings, layers, last norm.

    The layers are the longest module list; the other parts are its siblings that have weights. Empty for a model
    without such a list.
    """
    modules = _modules(model)
    lists = {name: module for name, module in modules.items() if isinstance(module, nn.ModuleList)}
    if not lists:
        return ()
    layers = max(lists, key=lambda name: len(lists[name]))
    decoder = layers.rpartition(".")[0]
    groups: list[str] = []
    for child, module in modules[decoder].named_children():
        name = f"{decoder}.{child}" if decoder else child
        if name == layers:
            groups += [f"{layers}.{index}" for index in range(len(lists[layers]))]
        elif next(module.parameters(), None) is not None:
            groups.append(name)
    return tuple(groups)


def _hidden(output: object) -> Tensor | None:
    """The first tensor of a module's output."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
        return output[0]
    return None


@contextmanager
def record_states(model: nn.Module, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Outputs of the modules ``names`` in the block's first forward pass: ``(tokens, H)`` float32 on the CPU.

    Names that the model does not have are left out. A layer of an engine returns its value and the residual stream,
    which the next layer adds up: recorded is the sum, as the plain model's layer returns it.
    """
    modules = _modules(model)
    layers = {name for name in names if name.rpartition(".")[2].isdigit()}
    states: dict[str, Tensor] = {}

    def recorder(name: str) -> Callable[[nn.Module, object, object], None]:
        def record(_: nn.Module, __: object, output: object) -> None:
            hidden = _hidden(output)
            if hidden is None or name in states:
                return
            if name in layers and isinstance(output, tuple) and len(output) == 2:
                residual = output[1]
                if isinstance(residual, Tensor) and residual.shape == hidden.shape:
                    hidden = hidden + residual
            # A copy: engines go on writing into these buffers.
            states[name] = hidden.detach().reshape(-1, hidden.shape[-1]).to("cpu", torch.float32, copy=True)

        return record

    handles = [modules[name].register_forward_hook(recorder(name)) for name in names if name in modules]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


def first_stale_group(
    names: Sequence[str], policy: Mapping[str, Tensor], engine: Mapping[str, Tensor], dtype: torch.dtype
) -> str:
    """The first part whose outputs differ, given the states of both sides; the head when all of them agree.

    First after the last that agrees: a part may be cut differently in the engine (embeddings without their scale, say),
    and a difference that a later part does not show is none.
    """
    compared = [name for name in names if name in policy and name in engine]
    if not compared:
        return UNKNOWN
    agreeing = -1
    for index, name in enumerate(compared):
        ours, theirs = policy[name], engine[name][: policy[name].shape[0]]
        if ours.shape == theirs.shape:
            difference = (ours - theirs).norm() / ours.norm().clamp(min=1e-12)
            # A comparison that NaN fails.
            if float(difference) <= _STATE_TOLERANCE[dtype]:
                agreeing = index
    return HEAD if agreeing == len(compared) - 1 else compared[agreeing + 1]


class PolicyProbe:
    """The policy's side: scores the probe with the training model.

    Every method is a collective of the ranks that share the model.

    Args:
        model: the training model, sharded or not.
        vocab_size: of the model.
        dtype: coarsest type of the model's weights and computation.
        score: log-probabilities ``(1, R)`` of a batch's responses at temperature 1.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        vocab_size: int,
        dtype: torch.dtype,
        score: Callable[[DataProto], Tensor],
    ) -> None:
        self.model = model
        self.dtype = dtype
        self.tokens = probe_tokens(vocab_size)
        self.groups = layer_groups(model)
        self._score = score

    def _batch(self) -> DataProto:
        ids = self.tokens[None]
        columns = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "responses": ids[:, 1:]}
        return DataProto.from_dict(columns, meta_info={"temperature": 1.0})

    def log_probs(self) -> Tensor:
        """Log-probabilities ``(N - 1,)`` of the tokens after the first."""
        return self._score(self._batch())[0]

    def states(self) -> dict[str, Tensor]:
        """Outputs of the layer groups, see `record_states`."""
        with record_states(self.model, self.groups) as states:
            self._score(self._batch())
        return states
