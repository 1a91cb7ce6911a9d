# SPDX-License-Identifier: Apache-2.0
"""A tiny Qwen2-architecture policy with its own tokenizer: `python -m examples.quickstart.tiny_policy`.

The tokenizer is a byte-level BPE trained on the environment's own texts. Frequent phrases ("cabinet 1", "go to ",
"click[navy blue]") are added tokens, so prompts stay near 100 tokens. It is of Qwen2's own tokenizer class, because
`AutoTokenizer` gives every Qwen2 model that class, whatever its tokenizer file says.
"""

import argparse
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agent_system.step_discriminator.step_prompt import LABELS
from examples.quickstart.shop_phrases import mine_clicks, without_clicks
from verl.utils.errors import UserError
from verl.utils.fs import atomic_dir

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

PAD, BOS, EOS = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# Tags are whole tokens: the policy then spends one token on each, and never spells one wrong.
TAGS = ("<think>", "</think>", "<action>", "</action>")
_NUMBERED = re.compile(r"\b([a-z]+) \d+\b")
_LINE_ENDS = re.compile("|".join(["\n", ">", *map(re.escape, TAGS)]))
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)


def train_tokenizer(
    texts: Iterable[str], *, vocab_size: int, num_phrases: int, phrases: str = "things"
) -> "PreTrainedTokenizerBase":
    """Qwen2's own tokenizer class trained on `texts`, with frequent phrases, the action tags and the discriminator's
    two answers as added tokens.

    Args:
        texts: training text, one prompt or response each.
        vocab_size: entries of the byte-level BPE, the 256 bytes and the chat markers among them.
        num_phrases: at most so many phrases become single tokens.
        phrases: how they are found, a key of `PHRASES`.
    """
    from tokenizers import AddedToken, pre_tokenizers
    from transformers import Qwen2Tokenizer

    texts = list(texts)
    mode = PHRASES[phrases]
    # Not special: decoding a response must keep the tags for the action parser.
    added = [*TAGS, *LABELS, *mode.find(texts, num_phrases)]
    vocab = {token: index for index, token in enumerate([PAD, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    blank = Qwen2Tokenizer(vocab=vocab, merges=[], eos_token=EOS, pad_token=PAD, extra_special_tokens=[BOS])
    tokenizer = blank.train_new_from_iterator(mode.rest(texts), vocab_size=vocab_size, show_progress=False)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def mine_phrases(texts: Iterable[str], limit: int) -> list[str]:
    """Things ("cabinet 1", "cabinet") and what stands between them ("go to ", ", you see a "), most frequent first.

    A thing is the same token wherever it is mentioned, and so is the verb before it: a small model then learns soon to
    copy a command from the list of admissible ones.
    """
    texts = list(texts)
    nouns = {match[1] for text in texts for match in _NUMBERED.finditer(text)}
    # Longest first: "sinkbasin" must not be read as "sink".
    names = "|".join(sorted(map(re.escape, nouns), key=lambda name: (-len(name), name)))
    thing = re.compile(rf"\b(?:{names})(?: \d+)?\b")
    counts: Counter[str] = Counter()
    for text in texts:
        for line in _LINE_ENDS.split(text):
            end = 0
            for match in thing.finditer(line):
                counts.update((line[end : match.start()], match[0]))
                end = match.end()
            counts[line[end:]] += 1
    frequent = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [phrase for phrase, count in frequent if count > 1 and len(phrase) > 2][:limit]


@dataclass(frozen=True)
class PhraseMode:
    """How a tokenizer is fitted to an environment.

    find: (texts, at most so many) -> phrases. rest: texts -> what the byte-level BPE learns from.
    """

    find: Callable[[Iterable[str], int], list[str]]
    rest: Callable[[Iterable[str]], list[str]]


PHRASES: Mapping[str, PhraseMode] = {
    "things": PhraseMode(mine_phrases, list),
    "clicks": PhraseMode(mine_clicks, without_clicks),
}


def make_policy(
    out: Path,
    texts: Iterable[str],
    *,
    vocab_size: int = 512,
    num_phrases: int = 640,
    phrases: str = "things",
    hidden_size: int = 128,
    num_layers: int = 3,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    mlp_size: int = 256,
    max_positions: int = 4096,
    init_std: float = 0.08,
    seed: int = 0,
) -> int:
    """Write a randomly initialised policy (Hugging Face folder with tokenizer) to `out`; return its parameter count.

    The default width needs a larger initialisation than the usual 0.02 to learn quickly.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = train_tokenizer(texts, vocab_size=vocab_size, num_phrases=num_phrases, phrases=phrases)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        intermediate_size=mlp_size,
        max_position_embeddings=max_positions,
        tie_word_embeddings=True,
        initializer_range=init_std,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    with atomic_dir(out) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def read_sft_texts(parquet: Path, limit: int) -> list[str]:
    """Prompts and responses of the first `limit` rows of an SFT parquet file."""
    import pandas as pd

    if not parquet.is_file():
        raise UserError(f"{parquet} not found; make it with python -m examples.quickstart.sft_data")
    frame = pd.read_parquet(parquet).head(limit)
    return [*frame["prompt"].tolist(), *frame["response"].tolist()]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Make a randomly initialised tiny policy and its tokenizer.")
    parser.add_argument("--texts", type=Path, required=True, help="SFT parquet file whose texts train the tokenizer")
    parser.add_argument("--rows", type=int, default=10_000, help="rows of the file that are read (default 10,000)")
    parser.add_argument("--out", type=Path, required=True, help="folder to write (Hugging Face format)")
    parser.add_argument("--vocab-size", type=int, default=512, help="entries of the BPE (default 512)")
    parser.add_argument("--num-phrases", type=int, default=640, help="phrases that are single tokens (default 640)")
    parser.add_argument("--phrases", choices=PHRASES, default="things", help="how they are found (default things)")
    parser.add_argument("--hidden-size", type=int, default=128, help="default 128")
    parser.add_argument("--num-layers", type=int, default=3, help="default 3")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial weights")
    args = parser.parse_args()
    texts = read_sft_texts(args.texts, limit=args.rows)
    count = make_policy(
        args.out,
        texts,
        vocab_size=args.vocab_size,
        num_phrases=args.num_phrases,
        phrases=args.phrases,
        hidden_size=args.hidden_size,
        num_layers=args.num_layers,
        mlp_size=2 * args.hidden_size,
        seed=args.seed,
    )
    print(f"{args.out}: {count:,} parameters")


if __name__ == "__main__":
    main()
