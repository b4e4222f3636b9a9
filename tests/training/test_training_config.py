"""Configs: what is read, what is refused and in which words, what is shipped."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from training.small_config import small_mapping, write_texts

from nsa_flex.training.config import TrainConfig, load_yaml, read_config, shipped_configs
from nsa_flex.training.config_reading import from_mapping
from nsa_flex.training.dry_run import dry_run, memory
from nsa_flex.training.flops import num_parameters
from nsa_flex.training.mesh import check_mesh
from nsa_flex.training.models import PRESETS, build_model, decoder_layers
from nsa_flex.training.texts import find_texts
from nsa_flex.training.tokenization import BYTES


def of(section: str, **values: Any) -> TrainConfig:
    mapping = small_mapping(Path("out"), Path("texts"))
    return from_mapping(TrainConfig, {**mapping, section: {**mapping[section], **values}})


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("training", {"steps": "many"}, r"training\.steps is 'many' \(str\); expected an integer"),
        ("training", {"step": 3}, r"unknown key training\.step; did you mean steps\?"),
        ("training", {"steps": True}, r"training\.steps is True \(bool\); expected an integer"),
        ("training", {"steps": 0}, r"training: steps=0 must be at least 1"),
        ("training", {"learning_rate": 0}, r"training: learning_rate=0\.0 must be more than 0"),
        ("training", {"learning_rate": float("nan")}, "learning_rate=nan must be more than 0"),
        ("training", {"betas": [0.9]}, r"training: betas=\(0\.9,\) must be two numbers"),
        ("training", {"betas": 0.9}, r"training\.betas is 0\.9 \(float\); expected a list"),
        ("data", {"format": "step"}, r"data\.format is 'step' \(str\); expected one"),
        ("engine", {"compile": "yes please"}, r"engine\.compile is .*; expected true or false"),
        ("model", {"checkpoint": "x"}, "model: got preset and checkpoint; expected one of preset"),
        ("model", {"preset": None}, "model: got none; expected one of preset, config and"),
        (
            "model",
            {"nsa": {"window": 3}},
            r"unknown key model\.nsa\.window; did you mean",
        ),
        ("model", {"nsa": {"compress_stride": 5}}, r"model\.nsa: compress_stride=5 must divide"),
        ("model", {"nsa": None}, r"model\.nsa is empty; expected a mapping"),
        ("data", {"weights": [1, 2]}, "data: weights has 2 numbers; expected one for each of the"),
        ("data", {"weights": [0]}, r"data: weights=\[0\.0\] must be more than 0, and finite"),
        ("data", {"seq_len_warmup": [[4, 9]]}, "warmup: 9 must be a divisor of seq_len=64"),
        ("data", {"seq_len_warmup": [[4, 8], [4, 16]]}, "step 4 must come after 4"),
        ("data", {"seq_len_warmup": [[4]]}, "seq_len_warmup must be pairs of steps and length"),
        ("training", {"ema": 1.0}, r"training: ema=1\.0 must be from 0 up to 1"),
        ("data", {"held_out_share": 1}, r"data: held_out_share=1\.0 must be between 0 and 1"),
        ("data", {"files": 3}, r"data\.files is 3 \(int\); expected a list"),
        ("run", {"save_every": 5}, r"run: save_every=5 must be a multiple of log_every=2"),
        ("run", {"gates_every": 0, "strict": True}, "run: strict needs gates_every of at least 1"),
    ],
)
def test_what_is_wrong_is_named(section: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        of(section, **values)


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_that_no_generator_takes(seed: int) -> None:
    mapping = small_mapping(Path("out"), Path("texts"))
    with pytest.raises(ValueError, match=f"seed={seed} must be from 0 up to 4294967295"):
        from_mapping(TrainConfig, {**mapping, "seed": seed})


def test_no_files_at_all() -> None:
    with pytest.raises(ValueError, match="data: files is empty"):
        dry_run(of("data", files=[]))


def test_a_section_that_must_be_there() -> None:
    mapping = small_mapping(Path("out"), Path("texts"))
    del mapping["training"]
    with pytest.raises(ValueError, match="training is missing; the config must give it"):
        from_mapping(TrainConfig, mapping)
    with pytest.raises(ValueError, match=r"the config is \[\] \(list\); expected a mapping"):
        from_mapping(TrainConfig, [])


def test_numbers_as_yaml_reads_them_and_lists_of_one() -> None:
    config = of("training", learning_rate="1e-3")
    assert config.training.learning_rate == 1e-3
    assert of("data", files="one.txt").data.files == ("one.txt",)


def test_a_config_survives_its_file(tmp_path: Path) -> None:
    config = of("training", betas=[0.8, 0.9])
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config.to_dict()))
    assert read_config(str(file)) == config


def test_a_dry_run_counts_a_patched_checkpoint_as_it_is(tmp_path: Path) -> None:
    """Not by the sizes of NSA that the config has."""
    config = of("model", nsa={"compress_block_size": 4, "compress_stride": 4})
    build_model(config.model, config.data, BYTES).save_pretrained(tmp_path / "patched")
    (tmp_path / "a.txt").write_text("text")
    again = of("model", preset=None, checkpoint=str(tmp_path / "patched"), nsa={})
    again = dataclasses.replace(
        again, data=dataclasses.replace(again.data, files=(str(tmp_path / "a.txt"),))
    )
    loaded = build_model(again.model, again.data, BYTES)
    found = dry_run(again)
    assert found["parameters"] == num_parameters(loaded)
    added = [x.numel() for name, x in loaded.named_parameters() if ".nsa." in name]
    assert found["parameters_of_nsa"] == sum(added)


@pytest.mark.parametrize("values", ["all", "none"])
def test_sizes_and_backend_of_a_patched_checkpoint(tmp_path: Path, values: Any) -> None:
    def build(**section: Any) -> Any:
        return build_model(of("model", **section).model, of("model").data, BYTES, values=values)

    sizes = {"compress_stride": 8, "window_size": 64, "branches": ["selected", "sliding"]}
    config = of("model", nsa=sizes, backend="flex")
    build_model(config.model, config.data, BYTES).save_pretrained(tmp_path / "saved")
    saved = {"preset": None, "checkpoint": str(tmp_path / "saved")}
    some = {name: sizes[name] for name in ("window_size", "branches")}
    assert build(**saved, nsa=some).model.layers[0].self_attn.nsa.config == config.model.nsa
    for backend, expected in (("auto", "flex"), ("dense", "dense")):
        model = build(**saved, nsa=some, backend=backend)
        assert {layer.self_attn.nsa.backend for layer in model.model.layers} == {expected}
    message = r"model\.nsa\.window_size is 8, and .*saved was patched with 64: a patched"
    with pytest.raises(ValueError, match=message):
        build(**saved, nsa={"compress_stride": 8, "window_size": 8})


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("n_inner", {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2}),
        ("ffn_dim", {"model_type": "opt", "num_hidden_layers": 1, "hidden_size": 768}),
        ("ffn_hidden_size", {"model_type": "falcon", "num_hidden_layers": 1}),
    ],
)
def test_a_dry_run_takes_the_width_of_the_mlp_from_the_config(
    name: str, sizes: dict[str, Any]
) -> None:
    tokens_times_bytes = 4 * 2 * 64  # of the small config, float32

    def activations(**changes: int) -> int:
        config = of("model", preset=None, config={**sizes, **changes})
        model = build_model(config.model, config.data, BYTES, values="none")
        return memory(config, model)["activations"]

    assert activations(**{name: 96}) - activations(**{name: 64}) == 3 * 32 * tokens_times_bytes


def test_layers_that_stay_dense(tmp_path: Path) -> None:
    """Beside those with a window, which stay as they are; a checkpoint keeps what it has."""
    sizes = {
        "model_type": "qwen3",
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "use_sliding_window": True,
        "sliding_window": 8,
        "layer_types": ["full_attention"] * 3 + ["sliding_attention"],
    }

    def patched(**section: Any) -> list[bool]:
        model = build_model(of("model", **section).model, of("model").data, BYTES)
        model.save_pretrained(tmp_path / "last")
        return [hasattr(layer.self_attn, "nsa") for layer in model.model.layers]

    own = {"preset": None, "config": sizes}
    assert patched(**own) == [True, True, True, False]
    assert patched(**own, dense_layers=[0, 2]) == [False, True, False, False]
    saved = {"preset": None, "checkpoint": str(tmp_path / "last")}
    assert patched(**saved) == patched(**saved, dense_layers=[0]) == [False, True, False, False]
    with pytest.raises(ValueError, match=r"model.dense_layers has 1, a layer that .*last was pat"):
        patched(**saved, dense_layers=[0, 1])
    with pytest.raises(ValueError, match=r"dense_layers has 9; the model's layers are 0 to 3"):
        patched(**saved, dense_layers=[9])
    for layers, message in (
        ([4], "model.dense_layers has 4; the model's layers are 0 to 3"),
        ([-1], "model.dense_layers has -1; the model's"),
        ([0, 1, 2], "model.dense_layers leaves no layer to NSA"),
        (["a"], r"dense_layers\[0\]"),
    ):
        with pytest.raises(ValueError, match=message):
            patched(**own, dense_layers=layers)


def test_layers_that_stay_dense_without_nsa_or_over_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValueError, match="model: dense_layers are layers beside NSA's; expected"):
        of("model", attention="dense", dense_layers=[0])
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = of("model", dense_layers=[0])
    engine = dataclasses.replace(config.engine, context_parallel=2)
    with pytest.raises(ValueError, match=r"parallel is 2, and model.dense_layers \[0\]: on"):
        check_mesh(dataclasses.replace(config, engine=engine))


def test_layers_are_numbered_whatever_their_list_is_called(tmp_path: Path) -> None:
    sizes = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2}
    section = of("model", preset=None, config=sizes, dense_layers=[0]).model
    model = build_model(section, of("model").data, BYTES)
    layers = model.transformer.h
    assert [hasattr(layer.attn, "nsa") for layer in layers] == [False, True]
    assert decoder_layers(model) is layers
    (tmp_path / "a.txt").write_text("text")
    data = dataclasses.replace(of("data").data, files=(str(tmp_path / "a.txt"),))
    assert dry_run(dataclasses.replace(of("model"), model=section, data=data))["flops"] > 0


def test_head_dim_of_a_family_whose_config_class_lacks_it() -> None:
    """Qwen3-MoE's published configs have one; where attention reads none, it is an error."""
    moe = {"model_type": "qwen3_moe", "num_hidden_layers": 1, "num_experts": 2, "head_dim": 24}
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    data = of("data").data
    section = of("model", preset=None, config={**moe, **sizes}).model
    model = build_model(section, data, BYTES, values="none")
    assert model.model.layers[0].self_attn.q_proj.weight.shape == (48, 32)
    for model_type in ("gpt2", "gpt_neox"):  # GPT-NeoX's rotary embedding alone reads it
        section = of("model", preset=None, config={"model_type": model_type, "head_dim": 24}).model
        with pytest.raises(ValueError, match=r"unknown key model\.config\.head_dim"):
            build_model(section, data, BYTES, values="none")


def test_dense_layers_of_a_minicpm4() -> None:
    """Beside NSA they are dense: its own sparse attention cannot run there."""
    sizes = {
        "model_type": "minicpm",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "sparse_config": {},
    }
    section = of("model", preset=None, config=sizes, dense_layers=[0]).model
    model = build_model(section, of("model").data, BYTES)
    assert [hasattr(layer.self_attn, "nsa") for layer in model.model.layers] == [False, True]
    assert model(torch.randint(1, 256, (2, 40))).logits.isfinite().all()


def test_overrides(tmp_path: Path) -> None:
    chosen = read_config("125m", ("training.steps=7", "data.files=[a, b]", "out=here"))
    assert (chosen.training.steps, chosen.data.files, chosen.out) == (7, ("a", "b"), "here")
    for text, message in (
        ("training.steps", "'training.steps' is no override; expected section.key=value"),
        ("out.x=1", "out.x: out is not a section"),
        ("training.steps=[", "while parsing"),
    ):
        with pytest.raises(ValueError, match=message):
            read_config("125m", (text,))


def test_a_name_that_is_neither_file_nor_config(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere is neither a file nor one of the configs 125m"):
        read_config("nowhere")
    (tmp_path / "torn.yaml").write_text("a: [")
    with pytest.raises(ValueError, match=r"torn\.yaml: while parsing"):
        read_config(str(tmp_path / "torn.yaml"))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("seed: 3\nout: a\nseed: 4\n", r"seed is given twice \(line 3\)"),
        (
            "data:\n  files: [a]\n  seq_len: 8\n  seq_len: 8\n",
            r"seq_len is given twice \(line 4\)",
        ),
        ("training: {steps: 1}\ntraining: {steps: 1}\n", r"training is given twice \(line 2\)"),
        ("training: {steps: 1, steps: 2}\n", r"steps is given twice \(line 1\)"),
    ],
)
def test_a_key_that_is_given_twice(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "twice.yaml").write_text(text)
    with pytest.raises(ValueError, match=rf"twice\.yaml: {told}"):
        read_config(str(tmp_path / "twice.yaml"))
    with pytest.raises(ValueError, match=r"model\.nsa: window_size is given twice"):
        read_config("125m", ("model.nsa={window_size: 8, window_size: 9}",))


def test_keys_that_are_merged_and_given_anew() -> None:
    text = "outer:\n  a: &a {x: 1, y: 1}\n  b: &b {<<: *a, x: 2}\nc: {<<: *b}\nd: {<<: [*a, *b]}\n"
    found = load_yaml(text)
    assert found["outer"]["b"] == found["c"] == {"x": 2, "y": 1}
    assert found["d"] == {"x": 1, "y": 1}
    assert load_yaml("{1: a, '1': b}") == {1: "a", "1": "b"}


@pytest.mark.parametrize("name", sorted(shipped_configs()))
def test_shipped_configs_are_valid(name: str) -> None:
    config = read_config(name)
    assert config.model.preset in (None, *PRESETS)
    assert Path(config.out).name == name


def test_what_is_shipped() -> None:
    assert set(shipped_configs()) == {"tiny", "125m", "350m", "llama-8b-layers"}
    small = read_config("125m")
    sizes = PRESETS["125m"]
    assert (sizes["hidden_size"], sizes["num_hidden_layers"]) == (768, 12)
    assert (sizes["num_attention_heads"], sizes["num_key_value_heads"]) == (12, 2)
    assert small.model.nsa.counts == [32, 16, 64, 16, 1, 2, 512]
    assert small.training.batch_size >= 16
    assert small.data.seq_len == 2048


GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "train-command.md"


def test_the_guides_config_grows_from_4k_to_64k(tmp_path: Path) -> None:
    """On the machine of a dry run; every step has the same number of tokens."""
    [text] = re.findall(r"^```yaml\n(.*?)^```", GUIDE.read_text(), re.M | re.S)
    (tmp_path / "guide.yaml").write_text(text)
    write_texts(tmp_path / "my-text", 2)
    config = read_config(
        str(tmp_path / "guide.yaml"), (f"data.files=[{tmp_path / 'my-text'}]", "engine.device=cpu")
    )
    told = dry_run(config)
    assert told["tokens_per_step"] == 8 * 65536
    assert told["tokens"] == 4000 * told["tokens_per_step"]
    texts = find_texts(config)
    assert texts.stages == (0, 8 * 1000, 8 * 3000)
    assert [length for _, length in texts.training_rows().stages] == [4096, 16384, 65536]
