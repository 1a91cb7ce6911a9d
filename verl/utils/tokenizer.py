# SPDX-License-Identifier: Apache-2.0
"""Loading tokenizers."""

from __future__ import annotations

import logging
from typing import Any

from transformers import AutoProcessor, AutoTokenizer, PreTrainedTokenizerBase

from verl.utils.errors import UserError
from verl.utils.fs import copy_to_local

__all__ = ["hf_processor", "hf_tokenizer", "set_pad_token_id"]

logger = logging.getLogger(__name__)


def set_pad_token_id(tokenizer: PreTrainedTokenizerBase) -> None:
    """Gives a tokenizer without a padding token its end-of-sequence token as padding."""
    if tokenizer.pad_token_id is None:
        logger.warning("the tokenizer has no padding token; padding with %r", tokenizer.eos_token)
        tokenizer.pad_token = tokenizer.eos_token


def hf_tokenizer(
    name_or_path: str,
    correct_pad_token: bool = True,
    *,
    config_key: str = "actor_rollout_ref.model.path",
    **kwargs: Any,
) -> PreTrainedTokenizerBase:
    """Tokenizer of a Hugging Face folder or id; ``kwargs`` go to ``AutoTokenizer.from_pretrained``.

    Raises:
        UserError: nothing loadable is there; names ``config_key`` and the path.
    """
    location = copy_to_local(name_or_path, config_key)
    try:
        tokenizer = AutoTokenizer.from_pretrained(location, **kwargs)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{config_key}={name_or_path}: no tokenizer could be loaded from there "
            f"({' '.join(str(error).split())[:200]}); set {config_key} to a folder that holds one"
        ) from error
    if correct_pad_token:
        set_pad_token_id(tokenizer)
    return tokenizer


def hf_processor(name_or_path: str, **kwargs: Any) -> Any | None:
    """Multi-modal processor of a model, or None for a text model."""
    processor = AutoProcessor.from_pretrained(name_or_path, **kwargs)
    return None if isinstance(processor, PreTrainedTokenizerBase) else processor
