"""A config that trains in seconds, and text for it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from nsa_flex.training.config import TrainConfig
from nsa_flex.training.config_reading import from_mapping

WORDS = ("the", "sparse", "branch", "reads", "a", "block", "of", "keys", "and", "what", "came")
NSA = {
    "compress_block_size": 8,
    "compress_stride": 4,
    "select_block_size": 8,
    "num_selected_blocks": 4,
    "window_size": 12,
    "compression": "mlp",
}

# As large as the kernels ask for.
CUDA: dict[str, dict[str, Any]] = {
    "model": {
        "preset": None,
        "config": {
            "model_type": "llama",
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 64,
        },
        "nsa": {"num_selected_blocks": 4, "window_size": 64, "compression": "mlp"},
    },
    "engine": {"device": "cuda", "compile": True, "checkpointing": "none"},
}


def write_texts(folder: Path, count: int = 30) -> Path:
    """Files of a few hundred bytes of English, always the same."""
    folder.mkdir(exist_ok=True)
    draw = random.Random(0)
    for number in range(count):
        words = draw.choices(WORDS, k=draw.randrange(30, 200))
        (folder / f"{number:02}.txt").write_text(" ".join(words))
    return folder


def small_mapping(out: Path, texts: Path, **sections: Any) -> dict[str, Any]:
    """The values of the config, with `sections` over them."""
    values: dict[str, Any] = {
        "out": str(out),
        "model": {"preset": "tiny", "nsa": NSA},
        "data": {
            "files": [str(texts)],
            "held_out_share": 0.2,
            "seq_len": 64,
            "documents_per_row": 3,
        },
        "training": {
            "steps": 12,
            "batch_size": 2,
            "learning_rate": 1e-2,
            "warmup_steps": 2,
        },
        "engine": {"compile": False, "device": "cpu"},
        "run": {
            "log_every": 2,
            "gates_every": 4,
            "eval_every": 6,
            "eval_rows": 3,
            "save_every": 4,
            "heartbeat_seconds": 0.2,
        },
    }
    for name, section in sections.items():
        values[name] = {**values[name], **section} if isinstance(section, dict) else section
    return values


def small_config(out: Path, texts: Path, **sections: Any) -> TrainConfig:
    return from_mapping(TrainConfig, small_mapping(out, texts, **sections))
