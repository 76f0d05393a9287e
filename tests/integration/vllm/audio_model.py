"""A tiny model that hears: a Qwen2-Audio checkpoint with weights that matter, and its processor."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from .random_weights import draw_weights

if TYPE_CHECKING:
    from pathlib import Path

AUDIO_TOKEN = 253
_MARKS = {"<|AUDIO|>": AUDIO_TOKEN, "<|audio_bos|>": 254, "<|audio_eos|>": 255}


def make_audio_model(folder: Path) -> Path:
    """Save it where vLLM looks for models."""
    transformers: Any = importlib.import_module("transformers")  # slow
    model = transformers.Qwen2AudioForConditionalGeneration(_config())
    draw_weights(model)
    model.to(torch.float32).save_pretrained(folder)
    weights = folder / "model.safetensors"
    renamed = {name.replace("model.model.", "model."): t for name, t in load_file(weights).items()}
    save_file(renamed, weights, {"format": "pt"})
    transformers.Qwen2AudioProcessor(
        feature_extractor=transformers.WhisperFeatureExtractor(feature_size=16),
        tokenizer=_tokenizer(),
    ).save_pretrained(folder)
    return folder


def _config() -> Any:
    transformers: Any = importlib.import_module("transformers")
    text = transformers.Qwen2Config(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    audio = transformers.Qwen2AudioEncoderConfig(
        num_mel_bins=16,
        encoder_layers=1,
        encoder_attention_heads=1,
        encoder_ffn_dim=64,
        d_model=64,
    )
    return transformers.Qwen2AudioConfig(
        audio_config=audio.to_dict(), text_config=text.to_dict(), audio_token_index=AUDIO_TOKEN
    )


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415

    transformers: Any = importlib.import_module("transformers")
    words = {f"word-{number}": number for number in range(AUDIO_TOKEN)}
    tokenizer = Tokenizer(models.WordLevel(words | _MARKS, "word-0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"unk_token": "word-0", "bos_token": "word-1", "eos_token": "word-2"}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, additional_special_tokens=list(_MARKS), **names
    )
