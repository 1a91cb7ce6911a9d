# SPDX-License-Identifier: Apache-2.0
"""What every generation engine does, and what an engine is built from."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl.protocol import DataProto
from verl.trainer.config.worker_sections import RolloutConfig
from verl.utils.distributed import all_reduce_max
from verl.utils.model import compute_position_id_with_mask
from verl.workers.rollout.probe import PolicyProbe, StaleWeightsError, first_stale_group, probe_tolerance
from verl.workers.rollout.sampling import SamplingParams, resolve_sampling

__all__ = ["BaseRollout", "EngineSpec", "Generation"]

# Seeds of rows that bring none are drawn from here; 63 bits, so that they are valid int64.
_MAX_SEED = (1 << 63) - 1


# Part of the tolerance by which the policy must have moved before an engine that did not move at all is called stale.
_NOTICEABLE = 0.1


@dataclass(frozen=True)
class EngineSpec:
    """What an engine is built from.

    ``model_path``: local folder of the model; ``device``: where it computes; ``dtype``: of its weights;
    ``share_weights``: see `HFRollout`.
    """

    config: RolloutConfig
    model_path: str
    device: torch.device
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    seed: int = 0
    override_config: Mapping[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False
    share_weights: bool = False


@dataclass(frozen=True)
class Generation:
    """Responses of B rows.

    ``tokens`` ``(B, R)`` int64, right-padded with the pad id; ``lengths`` ``(B,)`` int64, tokens sampled, the first
    end token included; ``log_probs`` ``(B, R)`` float32 of the distribution sampled from, -1 in the padding, or None
    where the engine cannot give them; ``close_draws`` ``(B,)`` int64, tokens of the row that rounding decided (see
    `sampling.CLOSE_DRAW`), or None where the engine does not know.
    """

    tokens: Tensor
    lengths: Tensor
    log_probs: Tensor | None
    close_draws: Tensor | None = None

    def select(self, rows: Tensor) -> Generation:
        """These rows, in this order."""
        fields = (self.tokens, self.lengths, self.log_probs, self.close_draws)
        return Generation(*(None if column is None else column[rows] for column in fields))  # type: ignore[arg-type]


class BaseRollout(ABC):
    """Turns prompts into responses with weights that are handed to it.

    Args:
        config: the ``actor_rollout_ref.rollout`` section.
        eos_token_ids: every id that ends a response.
        pad_token_id: fills prompts on the left and responses on the right.
        dtype: of the engine's weights.
        seed: for rows that bring no ``sampling_seed``.
    """

    def __init__(
        self,
        config: RolloutConfig,
        *,
        eos_token_ids: Sequence[int],
        pad_token_id: int,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.eos_token_ids = tuple(eos_token_ids)
        self.pad_token_id = pad_token_id
        self.version = -1
        self.seed_generator = torch.Generator().manual_seed(seed)
        self._last_change: tuple[Tensor, Tensor] | None = None
        self._under_way: dict[int, tuple[Tensor, Tensor]] = {}

    @classmethod
    @abstractmethod
    def build(cls, spec: EngineSpec) -> BaseRollout:
        """An engine without weights.

        Raises:
            UserError: the engine cannot run this model or these settings.
        """

    @abstractmethod
    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take over all weights (plain model's names, unsharded) and set `version`.

        Raises:
            RuntimeError: a weight is unknown or missing.
        """

    @abstractmethod
    def release_weights(self) -> None:
        """Give the weights' memory back; the next `update_weights` takes it again, generating before it is an error."""

    @abstractmethod
    def generate(
        self, input_ids: Tensor, attention_mask: Tensor, seeds: Tensor, sampling: SamplingParams
    ) -> Generation:
        """Responses to left-padded prompts ``(B, P)``; row i is drawn with ``seeds[i]`` alone. Results on the CPU."""

    @abstractmethod
    def probe_log_probs(self, tokens: Tensor) -> Tensor:
        """Log-probability ``(N - 1,)`` float32 of every token of ``(N,)`` after the first, at temperature 1."""

    @abstractmethod
    def probe_states(self, tokens: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        """Outputs of the modules ``names`` for the tokens, see `record_states`; names it cannot show are left out."""

    def gives_log_probs(self, sampling: SamplingParams) -> bool:
        """Whether ``generate`` returns log-probabilities of the distribution it samples from."""
        return True

    def check_weights(self, probe: PolicyProbe, expected: Tensor) -> None:
        """Compare the engine with the policy that its weights come from; a collective of all ranks.

        Args:
            probe: the policy's side; its states are read only after a difference, and then on every rank.
            expected: what ``probe.log_probs()`` was when the weights were taken.

        Raises:
            StaleWeightsError: the mean absolute difference exceeds ``rollout.weight_probe_tolerance`` (null: by dtype),
                or the policy has moved since the engine last did; names the first part that differs.
        """
        found = self.probe_log_probs(probe.tokens)
        allowed = self.config.weight_probe_tolerance or probe_tolerance(self.dtype, probe.dtype)
        difference = float((found - expected).abs().mean())
        is_frozen = False
        if self._last_change is not None and torch.equal(found, self._last_change[1]):
            moved = float((expected - self._last_change[0]).abs().mean())
            is_frozen = moved > _NOTICEABLE * allowed
        else:
            # Small steps of the policy add up from the sync at which the engine last moved.
            self._last_change = expected, found
        # Written so that NaN is a difference.
        is_stale = not difference <= allowed
        if not _on_any_rank(is_stale or is_frozen):
            return
        # Collectives: ranks whose engine is in order take part as well, and stay silent.
        policy, engine = probe.states(), self.probe_states(probe.tokens, probe.groups)
        if is_stale:
            coarsest = max(self.dtype, probe.dtype, key=probe_tolerance)
            part = first_stale_group(probe.groups, policy, engine, coarsest)
            raise StaleWeightsError(
                f"the weights of the rollout engine are not the policy's after the sync of version {self.version}: the "
                f"log-probs of the probe prompt differ by {difference:.2g} on average ({allowed:.2g} allowed), and the "
                f"first part whose output differs is {part}"
            )
        if is_frozen:
            raise StaleWeightsError(
                f"the sync of version {self.version} did not reach the rollout engine: the policy's log-probs of the "
                "probe prompt have changed, and the engine's are the same to the last bit as before"
            )

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Responses in the columns that training reads.

        Args:
            prompts: ``input_ids``, ``attention_mask`` ``(B, P)`` int64, left-padded; optional ``sampling_seed``
                ``(B,)`` int64. ``meta_info`` may hold ``do_sample, temperature, top_k, top_p, validate``.

        Returns:
            ``prompts`` (B, P), ``responses`` (B, R), ``input_ids``, ``attention_mask``, ``position_ids`` (B, P + R),
            all int64, and ``rollout_log_probs`` (B, R) float32, unless the engine cannot give those of the distribution
            that was sampled from (`gives_log_probs`). The response's mask covers the sampled tokens, the
            first end token included; its positions go on by one, past the end token too. Where the engine knows,
            ``close_draws`` (B,) int64 counts the tokens that a batch of another shape might have drawn otherwise.
            ``meta_info["generate_s"]`` says how many seconds it took.
        """
        start = time.perf_counter()
        ids, mask, seeds = self._requested(prompts)
        out = self.generate(ids, mask, seeds, resolve_sampling(self.config, prompts.meta_info))
        return DataProto.from_dict(_columns(ids, mask, out), meta_info={"generate_s": time.perf_counter() - start})

    def generate_some(self, prompts: DataProto) -> DataProto:
        """Take on more rows and generate until some of all that are under way have ended.

        Args:
            prompts: as for `generate_sequences`, or no row at all; and ``row`` ``(B,)`` int64, 0 or more, which names a
                row until it has ended. ``meta_info["share"]``, in (0, 1]: how many of the rows under way have to end;
                1 waits for all.

        Returns:
            The columns of `generate_sequences`, and ``row``, of the rows that have ended: at least one where there are
            any. The others go on in the next call. Their sampling must be the same.
        """
        start = time.perf_counter()
        assert prompts.batch is not None, "generate_some needs the column row"
        keys = prompts.batch["row"]
        ids, mask, seeds = self._requested(prompts)
        self._under_way.update(zip(keys.tolist(), zip(ids, mask)))
        sampling = resolve_sampling(self.config, prompts.meta_info)
        ended, out = self.advance(keys, ids, mask, seeds, sampling, float(prompts.meta_info["share"]))
        asked = [self._under_way.pop(key) for key in ended.tolist()]
        if asked:
            ids, mask = (torch.stack(column) for column in zip(*asked))
        else:
            ids, mask = ids[:0], mask[:0]
        columns = _columns(ids, mask, out) | {"row": ended}
        return DataProto.from_dict(columns, meta_info={"generate_s": time.perf_counter() - start})

    def advance(
        self,
        keys: Tensor,
        input_ids: Tensor,
        attention_mask: Tensor,
        seeds: Tensor,
        sampling: SamplingParams,
        share: float,
    ) -> tuple[Tensor, Generation]:
        """Keys and responses of the rows that have ended, see `generate_some`; this engine is done with all at once."""
        return keys, self.generate(input_ids, attention_mask, seeds, sampling)

    def abandon(self) -> None:
        """Forget the rows under way."""
        self._under_way.clear()

    def _requested(self, prompts: DataProto) -> tuple[Tensor, Tensor, Tensor]:
        """Prompts, mask and seeds of a call."""
        if prompts.batch is None:
            raise ValueError("generating needs the tensors input_ids and attention_mask")
        ids, mask = prompts.batch["input_ids"], prompts.batch["attention_mask"]
        if not bool(mask.any(dim=1).all()):
            raise ValueError("a prompt without tokens cannot be continued")
        if "sampling_seed" in prompts.batch:
            return ids, mask, prompts.batch["sampling_seed"]
        return ids, mask, torch.randint(_MAX_SEED, (ids.shape[0],), generator=self.seed_generator)


def _columns(ids: Tensor, mask: Tensor, out: Generation) -> dict[str, Tensor]:
    """The columns that training reads, of prompts ``(B, P)`` and their responses."""
    columns = torch.arange(out.tokens.shape[1])
    positions = compute_position_id_with_mask(mask)
    tensors = {
        "prompts": ids,
        "responses": out.tokens,
        "input_ids": torch.cat([ids, out.tokens], dim=1),
        "attention_mask": torch.cat([mask, (columns < out.lengths[:, None]).to(mask.dtype)], dim=1),
        "position_ids": torch.cat([positions, positions[:, -1:] + 1 + columns], dim=1),
    }
    if out.log_probs is not None:
        tensors["rollout_log_probs"] = out.log_probs
    if out.close_draws is not None:
        tensors["close_draws"] = out.close_draws
    return tensors


def _on_any_rank(flag: bool) -> bool:
    """Whether the flag is set on any rank; a collective where there are several."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return flag
    # Every process group of the workers takes CPU tensors.
    return all_reduce_max(int(flag), torch.device("cpu")) > 0
