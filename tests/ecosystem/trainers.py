"""A small Trainer of each library that is installed, in the form that its release takes."""

from __future__ import annotations

import importlib
import inspect
from typing import Any, Callable, Dict, Optional

import torch
from transformers import DataCollatorForLanguageModeling, DataCollatorWithPadding, Trainer

from tests.ecosystem import tiny
from tests.fixtures import make_args, with_evaluation_every_step

CLASSES = 3


def has_cross_encoder_trainer() -> bool:
    return hasattr(importlib.import_module("sentence_transformers.cross_encoder"), "CrossEncoderTrainer")


def stacks_preferences() -> bool:
    """Whether trl's collators make two rows of a preference, the chosen answer's and the rejected one's."""
    return hasattr(importlib.import_module("trl"), "SFTConfig")


ROWS_OF_A_PREFERENCE = 2 if stacks_preferences() else 1


def _training(**options: Any) -> Dict[str, Any]:
    """Two steps, each logged and followed by an evaluation."""
    return {
        "max_steps": 2,
        "logging_strategy": "steps",
        "logging_steps": 1,
        "seed": 0,
        **with_evaluation_every_step(),
        **options,
    }


def _tokenizer_for(cls: type) -> Dict[str, Any]:
    """What the parameter is called: `tokenizer` became `processing_class`."""
    name = "processing_class" if "processing_class" in inspect.signature(cls).parameters else "tokenizer"
    return {name: tiny.tokenizer()}


def _accepted(cls: type, **arguments: Any) -> Dict[str, Any]:
    """Those arguments that moved from the Trainer to its configuration, where they still are the Trainer's."""
    return {name: value for name, value in arguments.items() if name in inspect.signature(cls).parameters}


def sft(compute_metrics: Optional[Callable[..., Any]] = None, rows: int = tiny.EVALUATED, **options: Any) -> Any:
    import trl
    from transformers import TrainingArguments

    return trl.SFTTrainer(
        model=tiny.causal_model(),
        args=make_args(getattr(trl, "SFTConfig", TrainingArguments), **_training(**options)),
        train_dataset=tiny.sentences(tiny.TRAINED),
        eval_dataset=tiny.sentences(rows),
        compute_metrics=compute_metrics,
        **_tokenizer_for(trl.SFTTrainer),
        **_accepted(trl.SFTTrainer, dataset_text_field="text", max_seq_length=32),
    )


def dpo(compute_metrics: Optional[Callable[..., Any]] = None, rows: int = tiny.EVALUATED, **options: Any) -> Any:
    import trl
    from transformers import TrainingArguments

    return trl.DPOTrainer(
        model=tiny.causal_model(),
        ref_model=tiny.causal_model(),
        args=make_args(
            getattr(trl, "DPOConfig", TrainingArguments), **_training(remove_unused_columns=False, **options)
        ),
        train_dataset=tiny.preferences(tiny.TRAINED),
        eval_dataset=tiny.preferences(rows),
        compute_metrics=compute_metrics,
        **_tokenizer_for(trl.DPOTrainer),
        **_accepted(trl.DPOTrainer, max_length=32, max_prompt_length=16),
    )


def reward(compute_metrics: Optional[Callable[..., Any]] = None, rows: int = tiny.EVALUATED, **options: Any) -> Any:
    import trl

    # In trl 0.8 the user makes tokens of both answers; the newest takes the preferences themselves.
    makes_tokens = hasattr(trl.RewardTrainer, "_prepare_dataset")
    data = tiny.preferences if makes_tokens else tiny.tokens_of_preferences
    return trl.RewardTrainer(
        model=tiny.classifier(labels=1),
        args=make_args(trl.RewardConfig, **_training(remove_unused_columns=makes_tokens, max_length=32, **options)),
        train_dataset=data(tiny.TRAINED),
        eval_dataset=data(rows),
        compute_metrics=compute_metrics,
        **_tokenizer_for(trl.RewardTrainer),
    )


def lora(compute_metrics: Optional[Callable[..., Any]] = None, rows: int = tiny.EVALUATED, **options: Any) -> Any:
    """The stock Trainer over a model of peft's."""
    import peft

    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj", "v_proj"])
    return Trainer(
        model=peft.get_peft_model(tiny.classifier(CLASSES), config),
        args=make_args(**_training(label_names=["labels"], **options)),
        train_dataset=tiny.classified(tiny.TRAINED, CLASSES),
        eval_dataset=tiny.classified(rows, CLASSES),
        data_collator=DataCollatorWithPadding(tiny.tokenizer()),
        compute_metrics=compute_metrics,
    )


def causal(compute_metrics: Optional[Callable[..., Any]] = None, rows: int = tiny.EVALUATED, **options: Any) -> Any:
    """The stock Trainer over a causal language model."""
    return Trainer(
        model=tiny.causal_model(),
        args=make_args(**_training(**options)),
        train_dataset=tiny.tokens(tiny.TRAINED),
        eval_dataset=tiny.tokens(rows),
        data_collator=DataCollatorForLanguageModeling(tiny.tokenizer(), mlm=False),
        compute_metrics=compute_metrics,
    )


def sentence_transformer(rows: int = tiny.EVALUATED, **options: Any) -> Any:
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
        losses,
    )
    from sentence_transformers.evaluation import EmbeddingSimilarityEvaluator

    model = SentenceTransformer(tiny.encoder_directory(), device="cpu")
    evaluated = tiny.pairs(rows)
    return SentenceTransformerTrainer(
        model=model,
        args=make_args(SentenceTransformerTrainingArguments, **_training(**options)),
        train_dataset=tiny.pairs(tiny.TRAINED),
        eval_dataset=evaluated,
        loss=losses.CosineSimilarityLoss(model),
        evaluator=EmbeddingSimilarityEvaluator(evaluated["one"], evaluated["other"], evaluated["label"]),
    )


def cross_encoder(rows: int = tiny.EVALUATED, **options: Any) -> Any:
    from sentence_transformers.cross_encoder import CrossEncoder, CrossEncoderTrainer, CrossEncoderTrainingArguments
    from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss

    torch.manual_seed(0)  # for the head, which the saved encoder lacks
    model = CrossEncoder(tiny.encoder_directory(), num_labels=1, device="cpu")
    return CrossEncoderTrainer(
        model=model,
        args=make_args(CrossEncoderTrainingArguments, **_training(**options)),
        train_dataset=tiny.pairs(tiny.TRAINED),
        eval_dataset=tiny.pairs(rows),
        loss=BinaryCrossEntropyLoss(model),
    )


def setfit_classifier(rows: int = tiny.EVALUATED) -> Any:
    """setfit's Trainer, which is none of transformers: one of sentence-transformers works within."""
    from sentence_transformers import SentenceTransformer
    from setfit import SetFitModel, TrainingArguments
    from setfit import Trainer as SetFitTrainer
    from sklearn.linear_model import LogisticRegression

    def accuracy(predictions: Any, labels: Any) -> Dict[str, float]:
        return {"accuracy": float((torch.as_tensor(predictions) == torch.as_tensor(labels)).float().mean())}

    torch.manual_seed(0)
    body = SentenceTransformer(tiny.encoder_directory(), device="cpu")
    return SetFitTrainer(
        model=SetFitModel(model_body=body, model_head=LogisticRegression()),
        args=TrainingArguments(
            output_dir=make_args().output_dir,
            batch_size=4,
            max_steps=2,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=1,
            report_to="none",
        ),
        train_dataset=tiny.labelled(tiny.TRAINED),
        eval_dataset=tiny.labelled(rows),
        metric=accuracy,
    )
