# SPDX-License-Identifier: Apache-2.0
"""Generation program: ``python -m verl.trainer.main_generation key=value ...``.

Reads prompts from a parquet file, generates `data.n_samples` responses of each with the engine that training uses, and
writes the rows again with a column `responses`.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.utils.cli import hydra_program
from verl.utils.errors import UserError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from verl.protocol import DataProto
    from verl.trainer.config.generation_sections import GenerationConfig

__all__ = ["generate_responses", "main", "run_generation"]

logger = logging.getLogger(__name__)

RESPONSES = "responses"
"""Column of the output."""


def run_generation(config: GenerationConfig) -> Path:
    """Generate as `config` says and return the file that was written; it is whole or absent.

    Raises:
        UserError: something the user can fix; all but the model's weights is checked before a process is started.
    """
    from verl.trainer.config.generation_sections import validate_generation_config
    from verl.trainer.config.loading import check_device
    from verl.utils.programs import check_output
    from verl.utils.tokenizer import hf_tokenizer

    validate_generation_config(config)
    output = check_output(config.data.output_path, "data.output_path")
    device = check_device(config.trainer.device)
    tokenizer = hf_tokenizer(
        config.model.path, config_key="model.path", trust_remote_code=config.model.trust_remote_code
    )
    prompts = _read_prompts(config, tokenizer)
    with _worker_group(config, device) as worker_group:
        responses = generate_responses(prompts, worker_group, tokenizer, config)
    _write(config.data.path, output, responses)
    logger.info("wrote %d rows with %d responses each to %s", len(responses), config.data.n_samples, output)
    return output


def _read_prompts(config: GenerationConfig, tokenizer: Any) -> list[list[int]]:
    """Token ids of every prompt, at most `rollout.prompt_length` of them."""
    from verl.utils.dataset.chat import as_messages, render_prompts, tokenize_texts
    from verl.utils.dataset.parquet import read_column, read_parquet
    from verl.utils.dataset.sft_dataset import cut_row

    data, limit = config.data, config.rollout.prompt_length
    where = f"data.path={data.path}"
    cells = read_column(read_parquet(data.path, "data.path"), data.prompt_key, "data.prompt_key", where)
    for i, cell in enumerate(cells):
        try:
            as_messages(cell)
        except ValueError as error:
            raise UserError(f"{where}: row {i}, column {data.prompt_key!r}: {error}") from error
    ids = tokenize_texts(render_prompts(cells, tokenizer, data.apply_chat_template_kwargs), tokenizer)
    for i, row in enumerate(ids):
        if len(row) > limit and data.truncation == "error":
            raise UserError(
                f"{where}: row {i} has {len(row)} tokens, more than rollout.prompt_length={limit}; raise it or set "
                "data.truncation=left or right"
            )
    return [cut_row(row, limit, data.truncation) for row in ids]


@contextmanager
def _worker_group(config: GenerationConfig, device: str) -> Iterator[Any]:
    """The policy's worker group with its engine, ready to generate: one rank in this process, more under Ray."""
    from verl.trainer.ppo.worker_groups import ACTOR_ROLLOUT, RayWorkerGroups, core_roles, local_worker_groups
    from verl.utils.distributed import own_process_group
    from verl.workers.rollout.session import rollout_session

    workers = config.worker_config(device)
    roles = core_roles(workers, device)
    if workers.trainer.world_size == 1:
        with own_process_group():
            group = local_worker_groups(roles)[ACTOR_ROLLOUT]
            group.init_model()
            with rollout_session(group, 0):
                yield group
        return
    import ray

    from verl.trainer.ppo.ray_setup import demand, start_ray

    started = start_ray(workers, demand(workers, device, 0))
    factory = RayWorkerGroups(workers, device)
    try:
        group = factory(roles)[ACTOR_ROLLOUT]
        group.init_model()
        with rollout_session(group, 0):
            yield group
    finally:
        factory.close()
        if started:
            ray.shutdown()


def generate_responses(
    prompts: Sequence[Sequence[int]], worker_group: Any, tokenizer: Any, config: GenerationConfig
) -> list[list[str]]:
    """`data.n_samples` texts for every prompt (token ids), without special tokens.

    A text depends on (`rollout.seed`, row, sample) and the model only: not on `data.batch_size` or the number of ranks.
    """
    from tqdm import tqdm

    from verl.protocol import pad_dataproto_to_divisor, unpad_dataproto
    from verl.trainer.ppo.columns import tensors_of

    samples, texts = config.data.n_samples, []
    for start in tqdm(range(0, len(prompts), config.data.batch_size), desc="generating", unit="batch"):
        rows = range(start, min(start + config.data.batch_size, len(prompts)))
        batch = _request([(row, sample) for row in rows for sample in range(samples)], prompts, tokenizer, config)
        padded, added = pad_dataproto_to_divisor(batch, worker_group.world_size)
        out = unpad_dataproto(worker_group.generate_sequences(padded), added)
        tensors = tensors_of(out)
        answers = tensors["responses"]
        lengths = tensors["attention_mask"][:, -answers.shape[1] :].sum(dim=1).tolist()
        texts += [tokenizer.decode(ids[:length], skip_special_tokens=True) for ids, length in zip(answers, lengths)]
    return [texts[start : start + samples] for start in range(0, len(texts), samples)]


def _request(
    keys: Sequence[tuple[int, int]], prompts: Sequence[Sequence[int]], tokenizer: Any, config: GenerationConfig
) -> DataProto:
    """Left-padded prompts with the sampling seed of every (row, sample)."""
    import torch

    from agent_system.multi_turn_rollout.seats import sampling_seed
    from verl.protocol import DataProto
    from verl.utils.dataset.chat import pad_id

    width = max(len(prompts[row]) for row, _ in keys)
    ids = torch.full((len(keys), width), pad_id(tokenizer), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, (row, _) in enumerate(keys):
        length = len(prompts[row])
        ids[i, width - length :] = torch.tensor(prompts[row], dtype=torch.int64)
        mask[i, width - length :] = 1
    seed = config.rollout.seed or 0
    seeds = torch.tensor([sampling_seed(seed, "generation", str(row), sample, 0) for row, sample in keys])
    return DataProto.from_dict({"input_ids": ids, "attention_mask": mask, "sampling_seed": seeds})


def _write(source: str, output: Path, responses: list[list[str]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from verl.utils.fs import atomic_write

    table = pq.read_table(Path(source).expanduser())
    if RESPONSES in table.column_names:
        table = table.drop_columns([RESPONSES])
    table = table.append_column(RESPONSES, pa.array(responses, type=pa.list_(pa.string())))
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    atomic_write(output, buffer.getvalue())


def _run(cfg: DictConfig) -> None:
    from verl.trainer.config.builder import build_config
    from verl.trainer.config.generation_sections import GenerationConfig

    run_generation(build_config(GenerationConfig, cfg))


main = hydra_program(_run, "verl.trainer.config", "generation")

if __name__ == "__main__":
    main()
