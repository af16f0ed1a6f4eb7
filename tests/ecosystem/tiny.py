"""Tokenizer, models and data of a few words, with seeded weights: nothing is downloaded."""

from __future__ import annotations

import functools
import tempfile
from typing import Any, Dict, List

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

WORDS = (
    "to",
    "be",
    "or",
    "not",
    "that",
    "is",
    "the",
    "question",
    "whether",
    "nobler",
    "in",
    "mind",
    "suffer",
    "arrows",
)
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[EOS]")
SIZES: Dict[str, Any] = {
    "vocab_size": len(WORDS) + len(SPECIAL),
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "pad_token_id": 0,
}
TRAINED, EVALUATED = 8, 10  # rows; the evaluation's last batch of four is not full

_saved = tempfile.TemporaryDirectory(prefix="shim-ecosystem-")


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: at for at, word in enumerate([*SPECIAL, *WORDS])}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    pad, unknown, start, separator, mask, end = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token=pad,
        unk_token=unknown,
        cls_token=start,
        sep_token=separator,
        mask_token=mask,
        bos_token=start,
        eos_token=end,
        model_max_length=64,
    )


def causal_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(_llama())


def classifier(labels: int) -> LlamaForSequenceClassification:
    torch.manual_seed(0)
    return LlamaForSequenceClassification(_llama(num_labels=labels))


def _llama(**more: Any) -> LlamaConfig:
    return LlamaConfig(max_position_embeddings=64, bos_token_id=2, eos_token_id=5, **SIZES, **more)


@functools.cache
def encoder_directory() -> str:
    """Folder of a saved BERT and its tokenizer, for libraries that load models by name."""
    torch.manual_seed(0)
    directory = tempfile.mkdtemp(dir=_saved.name)
    BertModel(BertConfig(max_position_embeddings=64, **SIZES)).save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory


def texts(rows: int, shift: int = 0) -> List[str]:
    """Sentences of three to seven words, so that batches have tokens of different lengths."""
    return [" ".join(WORDS[(row * 5 + shift + at) % len(WORDS)] for at in range(3 + row % 5)) for row in range(rows)]


def sentences(rows: int) -> Dataset:
    return Dataset.from_dict({"text": texts(rows)})


def tokens(rows: int) -> Dataset:
    return Dataset.from_dict({"input_ids": tokenizer()(texts(rows))["input_ids"]})


def preferences(rows: int) -> Dataset:
    return Dataset.from_dict({"prompt": texts(rows), "chosen": texts(rows, 1), "rejected": texts(rows, 2)})


def pairs(rows: int) -> Dataset:
    """Two sentences, and whether they go together."""
    return Dataset.from_dict(
        {"one": texts(rows), "other": texts(rows, 3), "label": [float(row % 2) for row in range(rows)]}
    )


def labelled(rows: int) -> Dataset:
    return Dataset.from_dict({"text": texts(rows), "label": [row % 2 for row in range(rows)]})


def classified(rows: int, labels: int) -> Dataset:
    """Tokens and classes, ready for a collator that pads."""
    encoded = tokenizer()(texts(rows))["input_ids"]
    return Dataset.from_dict({"input_ids": encoded, "labels": [row % labels for row in range(rows)]})


def tokens_of_preferences(rows: int) -> Dataset:
    """The preferences, with each answer in tokens."""
    encode = tokenizer()
    columns: Dict[str, Any] = {}
    for answer, shift in (("chosen", 1), ("rejected", 2)):
        encoded = encode(texts(rows, shift))
        columns[f"input_ids_{answer}"] = encoded["input_ids"]
        columns[f"attention_mask_{answer}"] = encoded["attention_mask"]
    return Dataset.from_dict(columns)
