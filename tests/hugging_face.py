"""Tiny Hugging Face models and tokenizers, made from configs with random weights and written with
save_pretrained. Needs the extra `hugging-face`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", reason="the extra hugging-face is not installed")

VOCABULARY = 400
TEXTS = (
    "the cat sat on the mat",
    "a dog ran over the hill and far away",
    "never has a film been this dull",
    "what a fine day it was",
    "User asks: how are you?\nAssistant answers: quite well, thank you!",
)
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<s>", "</s>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}</s>{% endgeneration %}{% else %}{{ message['content'] }}</s>"
    "{% endif %}\n{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)

_ENCODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_SMALL: dict[str, dict[str, Any]] = {
    "bert": _ENCODER,
    "llama": {**_ENCODER, "num_key_value_heads": 1, "bos_token_id": 5, "eos_token_id": 6},
    "gpt2": {
        "vocab_size": VOCABULARY,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 64,
        "bos_token_id": 5,
        "eos_token_id": 6,
    },
    "t5": {
        "vocab_size": VOCABULARY,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 2,
        "num_heads": 2,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
        "eos_token_id": 6,
    },
    "vit": {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "image_size": 8,
        "patch_size": 4,
    },
}
AUTO = {
    "sequence-classification": "AutoModelForSequenceClassification",
    "regression": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "image-classification": "AutoModelForImageClassification",
    "question-answering": "AutoModelForQuestionAnswering",
}
_ARCHITECTURE = {"causal-lm": "llama", "seq2seq-lm": "t5", "image-classification": "vit"}


def tiny_model(
    task: str, folder: Path, *, architecture: str | None = None, seed: int = 0, **config: Any
) -> Any:
    """A model for a task with random weights, in float32 and eval mode, written to `folder`.

    `architecture` is a model type of transformers; the default is bert, llama for causal-lm, t5 for
    seq2seq-lm and vit for image-classification. `config` are more keys of its config. Types without small
    sizes here get theirs in `config`.
    """
    kind = architecture or _ARCHITECTURE.get(task, "bert")
    sizes = dict(_SMALL.get(kind, _ENCODER))
    if task == "regression":
        sizes |= {"num_labels": 1, "problem_type": "regression"}
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    made = transformers.AutoConfig.for_model(kind, **{**sizes, **config})
    model = getattr(transformers, AUTO[task]).from_config(made).eval()
    torch.set_rng_state(state)
    model.save_pretrained(folder)
    return model


def tiny_tokenizer(folder: Path, texts: Sequence[str] = TEXTS, kind: str = "bert", **options: Any) -> Any:
    """A tokenizer trained on the texts, at most VOCABULARY tokens, written to `folder`.

    `kind` is "bert" (word pieces, [CLS] and [SEP] around the text), "gpt" (bytes, nothing around it, no pad
    token) or "t5" (bytes, </s> at the end). `options` are more arguments of PreTrainedTokenizerFast, such as
    pad_token or chat_template.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    special = {name: SPECIAL.index(name) for name in SPECIAL}
    if kind == "bert":
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        trainer: Any = trainers.WordPieceTrainer(
            vocab_size=VOCABULARY, special_tokens=SPECIAL, show_progress=False
        )
        names = {name: f"[{name[:-6].upper()}]" for name in ("cls_token", "sep_token", "mask_token")}
        names |= {"pad_token": "[PAD]", "unk_token": "[UNK]"}
        around = ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1")
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        names = {"bos_token": "<s>", "eos_token": "</s>"}
        names |= {"pad_token": "[PAD]"} if kind == "t5" else {}
        around = ("$A </s>", "$A </s> $B </s>") if kind == "t5" else ("$A", "$A $B")
    tokenizer.train_from_iterator(list(texts), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=around[0], pair=around[1], special_tokens=list(special.items())
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{"model_max_length": 64, **names, **options}
    )
    fast.save_pretrained(folder)
    return fast


__all__ = ["AUTO", "CHAT_TEMPLATE", "SPECIAL", "TEXTS", "VOCABULARY", "tiny_model", "tiny_tokenizer"]


def save_lora(folder: Path, base: Path, targets: Sequence[str], rank: int = 2) -> None:
    """Write a new adapter of the causal language model in `base`, whose update is zero, as peft does."""
    import peft

    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    settings = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=list(targets), task_type="CAUSAL_LM")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        peft.get_peft_model(model, settings).save_pretrained(folder)


def quantise(folder: Path, bits: str, dtype: torch.dtype = torch.float32) -> Any:
    """Write the causal language model of a folder anew, its layers in `bits`: 8bit, 4bit (as QLoRA has them),
    nf4 or fp4. The model that bitsandbytes keeps.
    """
    options: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_quant_type": bits.replace("4bit", "nf4")}
    options = {"load_in_8bit": True} if bits == "8bit" else options
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        quantization_config=transformers.BitsAndBytesConfig(
            **options, **({"bnb_4bit_use_double_quant": True} if bits == "4bit" else {})
        ),
        device_map={"": "cpu"},
        dtype=dtype,
    )
    for name in ("model.safetensors", "config.json"):
        (folder / name).unlink()
    model.save_pretrained(folder)
    return model
