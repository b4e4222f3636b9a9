"""TRL's trainers on a patched model: packing, and where reference models come from."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
from trl.trainer.utils import create_model_from_path, get_config_model_id

import nsa_flex
from patching.tiny_models import NSA, VOCABULARY, tiny_model, tokens


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, VOCABULARY)}}
    backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


@torch.no_grad()
def logits(model: nn.Module, ids: Tensor, **call: Any) -> Tensor:
    return model(ids, **call).logits


def test_what_trl_packs_is_each_document_alone() -> None:
    documents = [tokens(1, length)[0].tolist() for length in (50, 13, 37)]
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    batch = collate([{"input_ids": ids} for ids in documents])
    batch.pop("labels")
    model = nsa_flex.patch(tiny_model(), NSA)
    packed = logits(model, batch.pop("input_ids"), use_cache=False, **batch)
    alone = [logits(model, torch.tensor([ids]), use_cache=False) for ids in documents]
    torch.testing.assert_close(packed, torch.cat(alone, 1))


def dpo(model: nn.Module, folder: Path, **options: Any) -> DPOTrainer:
    pairs = [{"prompt": "w5 w6", "chosen": "w7 w8 w9", "rejected": "w9 w10"}] * 2
    arguments = DPOConfig(
        str(folder / "dpo"), max_steps=1, report_to=[], use_cpu=True, bf16=False, logging_steps=1
    )
    return DPOTrainer(
        model,
        args=arguments,
        train_dataset=Dataset.from_list(pairs),
        processing_class=tokenizer(),
        **options,
    )


@pytest.fixture
def from_disk(tmp_path: Path) -> nn.Module:
    """A model patched in memory, which was made from a dense checkpoint."""
    tiny_model().save_pretrained(tmp_path / "dense")
    return nsa_flex.patch(AutoModelForCausalLM.from_pretrained(tmp_path / "dense"), NSA)


def test_dpo_does_not_take_the_dense_checkpoint_for_the_reference(
    from_disk: nn.Module, tmp_path: Path
) -> None:
    with pytest.raises(OSError, match=r"save_pretrained it, then nsa_flex\.load"):
        dpo(from_disk, tmp_path)


def test_dpo_with_an_explicit_reference_starts_at_no_difference(
    from_disk: nn.Module, tmp_path: Path
) -> None:
    trainer = dpo(from_disk, tmp_path, ref_model=copy.deepcopy(from_disk))
    trainer.train()
    loss = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    assert loss == pytest.approx(torch.log(torch.tensor(2.0)).item(), abs=1e-4)


def test_the_reference_of_a_loaded_model_is_the_patched_checkpoint(
    from_disk: nn.Module, tmp_path: Path
) -> None:
    from_disk.save_pretrained(tmp_path / "sparse")
    model = nsa_flex.load(tmp_path / "sparse")
    # As DPOTrainer and GRPOTrainer make theirs.
    reference = create_model_from_path(
        get_config_model_id(model.config), attn_implementation=model.config._attn_implementation
    )
    ids = tokens(2, 50)
    assert torch.equal(logits(reference, ids), logits(model, ids))
