"""The checkpoints of NSA-1B, SSA-1B and MoBA-1B: their config.json and names of tensors.

They are Llamas with one more weight a layer, `self_attn.g_proj`, three gates a head. SSA and MoBA
have the selected branch alone, and leave the other two gates unread. φ is the mean, of keys behind
the rotary embedding. Plain dicts and strings: nothing here needs transformers.
"""

from __future__ import annotations

from typing import Any

from nsa_flex.config import NSAConfig

MODEL_TYPE = "llama-nsa"
# What a caller may say of a checkpoint otherwise than its config.json does.
OPTIONS = ("selection", "inference_mode")

_UPSTREAM_NAME, _OWN_NAME = ".self_attn.g_proj.weight", ".self_attn.nsa.gates.linear.weight"
_ZEROS = ".self_attn.nsa.gates.offset"  # of gates without one
_DEFAULTS = {"block_size": 64, "block_counts": 16, "window_size": 512}
# Written back as they were; the others follow from the record.
_KEPT = ("auto_map", "inference_mode", "selection")


def own_name(name: str) -> str | None:
    """The name of a tensor that the patch added, from its name in the checkpoint; else None."""
    is_added = name.endswith(_UPSTREAM_NAME)
    return name.removesuffix(_UPSTREAM_NAME) + _OWN_NAME if is_added else None


def upstream_name(name: str) -> str | None:
    """The name in the checkpoint of a tensor of the patched model; None if it is not written."""
    if name.endswith(_ZEROS):
        return None
    is_added = name.endswith(_OWN_NAME)
    return name.removesuffix(_OWN_NAME) + _UPSTREAM_NAME if is_added else name


def from_upstream(config: dict[str, Any]) -> dict[str, Any]:
    """The config of the Llama in memory, with the record of its patch.

    Raises:
        ValueError: the model attends densely, or chooses blocks in a way that is not known here.
    """
    kept = {name: config[name] for name in _KEPT if name in config}
    base = {k: v for k, v in config.items() if k not in (*_KEPT, *_DEFAULTS)}
    architectures = [
        name.replace("LlamaNSA", "Llama") for name in config.get("architectures") or []
    ]
    record = {
        "config": _nsa_config(config).to_dict(),
        "init": "unbiased",
        "backend": "auto",
        "layers": [f"layers.{i}.self_attn" for i in range(config["num_hidden_layers"])],
        "attn_implementation": "sdpa",
        "kept_masks": [],
        "format": MODEL_TYPE,
        "kept": kept,
    }
    return {**base, "model_type": "llama", "architectures": architectures, "nsa_flex": record}


def to_upstream(config: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `from_upstream`: config.json under the names that upstream's code reads."""
    written = {k: v for k, v in config.items() if k != "nsa_flex"}
    record, rope = config["nsa_flex"], dict(written.pop("rope_parameters", None) or {})
    nsa = NSAConfig.from_dict(record["config"])
    theta = rope.pop("rope_theta", None)
    return {
        **written,
        **record["kept"],
        "model_type": MODEL_TYPE,
        "architectures": [
            name.replace("Llama", "LlamaNSA") for name in written.get("architectures") or []
        ],
        "block_size": nsa.select_block_size,
        "block_counts": nsa.num_selected_blocks,
        "window_size": nsa.window_size if nsa.has("sliding") else 0,
        **({} if theta is None else {"rope_theta": theta}),
        "rope_scaling": None if rope.get("rope_type", "default") == "default" else rope,
        "torch_dtype": written.get("dtype"),
    }


def _nsa_config(config: dict[str, Any]) -> NSAConfig:
    block, count, window = (config.get(name, value) for name, value in _DEFAULTS.items())
    mode = config.get("inference_mode")
    if mode not in (None, "sparse", "full"):
        raise ValueError(f"inference_mode is {mode!r}; it must be sparse or full")
    if mode == "full":
        raise ValueError(
            "the checkpoint's inference_mode is 'full', gated dense attention, which nsa_flex "
            "does not compute: pass inference_mode='sparse' for its sparse attention"
        )
    if window == 0 and block == 64 and mode is None:
        raise ValueError(
            "block_size=64 and window_size=0 are those of FullAttn-1B, gated dense attention, "
            "which nsa_flex does not compute: pass inference_mode='sparse' if it selects blocks"
        )
    return NSAConfig(
        compress_block_size=block,
        compress_stride=block,
        select_block_size=block,
        num_selected_blocks=count,
        num_initial_blocks=0,
        num_local_blocks=1,
        compression="mean",
        selection=config.get("selection") or _trained_selection(block, count),
        **({"window_size": window} if window else {"branches": ("selected",)}),
    )


def _trained_selection(block: int, count: int) -> Any:
    """Upstream's kernel merges tiles of as many blocks as a block has tokens, by halves."""
    if count <= block // 2:
        return "top_k"
    if count == block:
        return "tiled_top_k"
    raise ValueError(
        f"block_counts={count} with block_size={block}: upstream's kernel keeps halves of tiles "
        f"of {block} blocks, which is known here for up to {block // 2} blocks and for {block}; "
        "pass selection='top_k' for the best of all blocks"
    )
