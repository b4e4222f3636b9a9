"""`nsa-flex generate`: text from a patched model, once or in turns, with its speed."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
import typer

from nsa_flex.cli.generate_model import Loaded, Stream, load
from nsa_flex.cli.options import SEEDS, check_device, dtype_name, fail
from nsa_flex.cli.outputs import print_json

DTYPES = {"auto": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def generate(
    model: Annotated[str, typer.Argument(help="Folder of a checkpoint, or its name on the hub.")],
    prompt: Annotated[
        str | None,
        typer.Argument(help="Text to go on from; - reads stdin; none asks for one after another."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="At most so many a turn.")] = 200,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 takes the likeliest token, more samples.")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Sample among this share of probability.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the samples.", **SEEDS)] = 0,
    max_length: Annotated[
        int | None,
        typer.Option(
            min=1, help="Static cache of so many tokens, compiled on CUDA; none: it grows."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …; auto: CUDA if any.")] = "auto",
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}; auto: as saved.")] = "auto",
    as_json: Annotated[
        bool, typer.Option("--json", help="Report on stdout, the text as it comes on stderr.")
    ] = False,
) -> None:
    """Write text with a model that runs NSA: the new text on stdout, its speed on stderr.

    A checkpoint of an unpatched model is patched on loading (init="dense"), untrained. Without a
    prompt each line of stdin is one turn, and the cache keeps what was said before. Exits with 2
    if the model cannot be loaded or the text does not fit.

    Example: `nsa-flex generate nsa_flex_demo/model "import torch" --max-new-tokens 100`

    Example: `nsa-flex generate nsa_flex_demo/model - --temperature 0.8 --json < file.py`
    """
    kind = DTYPES[dtype_name(dtype, DTYPES)]
    if importlib.util.find_spec("transformers") is None:
        fail("generate", "needs transformers; install with: pip install 'nsa-flex[cli,hf]'")
    chosen = check_device(device, "generate runs")
    try:
        loaded = load(model, chosen, kind)
    except ValueError as error:
        fail("generate", str(error), error)
    if not loaded.patched:
        _say("this checkpoint was not trained with NSA: patched now, with gates at (0, 1, 0)")
    torch.manual_seed(seed)
    sampling: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        sampling |= {"temperature": temperature, "top_p": top_p}

    def write(piece: str) -> None:
        print(piece, end="", flush=True, file=sys.stderr if as_json else sys.stdout)

    writer = Writer(loaded, max_length, {**sampling, "max_new_tokens": max_new_tokens}, write)
    if prompt is None:
        _converse(writer, as_json)
        return
    if prompt == "-" and sys.stdin is None:
        fail("generate", "stdin is closed")
    report = _turn(writer, sys.stdin.read() if prompt == "-" else prompt)
    if as_json:
        print_json({"model": model, **report})


@dataclass
class Writer:
    """A text that grows turn by turn, and the cache of it.

    Args:
        loaded: the model.
        max_length: of a static cache; None for a growing one.
        options: passed to the model's `generate`.
        write: gets each piece of new text.
    """

    loaded: Loaded
    max_length: int | None
    options: dict[str, Any]
    write: Callable[[str], Any]
    ids: list[int] = field(default_factory=list)
    cache: Any = None

    def turn(self, text: str) -> dict[str, Any]:
        """Go on from the text so far and `text`; plain JSON types.

        Raises:
            ValueError: there is no token, or no room for so many.
        """
        from nsa_flex.patching.hf_versions import CACHE

        model = self.loaded.model
        said = self.loaded.tokens.encode(text, follows=bool(self.ids))
        ids = self.ids + said
        if not ids:
            raise ValueError("the prompt is empty")
        self._check_length(len(ids))
        if self.cache is None:
            from nsa_flex import NSACache

            self.cache = NSACache(model, max_length=self.max_length)
        stream = Stream(self.loaded.tokens.decoder(), self.write, self._stop())
        with torch.inference_mode():
            model.generate(
                torch.tensor([ids], device=model.device),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long, device=model.device),
                streamer=stream,
                **{CACHE: self.cache},
                **self.options,
            )
        self.ids = ids + stream.ids
        return {
            "text": stream.text,
            "prompt_tokens": len(said),
            "new_tokens": len(stream.ids),
            "seconds_to_first_token": stream.seconds_to_first,
            "tokens_per_second": stream.tokens_per_second,
            "length": len(self.ids),
            "cache_bytes": self.cache.memory().total,
            "static_cache": self.max_length is not None,
            "device": str(model.device),
            "dtype": str(model.dtype).removeprefix("torch."),
            "patched_on_loading": not self.loaded.patched,
        }

    def _check_length(self, num_tokens: int) -> None:
        config, new = self.loaded.model.config.get_text_config(), self.options["max_new_tokens"]
        limits = {
            "--max-length": self.max_length,
            "what the model was made for": getattr(config, "max_position_embeddings", None),
        }
        for name, limit in limits.items():
            if limit is not None and num_tokens + new > limit:
                raise ValueError(
                    f"{num_tokens} tokens and {new} new ones are more than {limit}, {name}"
                )

    def _stop(self) -> frozenset[int]:
        stop = self.loaded.model.generation_config.eos_token_id
        return frozenset(stop if isinstance(stop, list) else [] if stop is None else [stop])


def _turn(writer: Writer, text: str) -> dict[str, Any]:
    try:
        report = writer.turn(text)
    except ValueError as error:
        fail("generate", str(error), error)
    writer.write("\n")
    first, speed = report["seconds_to_first_token"], report["tokens_per_second"]
    _say(
        f"{report['prompt_tokens']} tokens read in {first:.2f} s, {report['new_tokens']} written"
        + (f" at {speed:.1f} a second" if speed else "")
        + f"; cache {report['cache_bytes'] / 1e6:.1f} MB for {report['length']} tokens"
    )
    return report


def _converse(writer: Writer, as_json: bool) -> None:
    """One turn for each line of stdin; one JSON line for each with `--json`."""
    while True:
        if sys.stdin.isatty():
            typer.echo("> ", nl=False, err=True)
        line = sys.stdin.readline()
        if not line:
            return
        if not line.strip():
            continue
        report = _turn(writer, line)
        if as_json:
            typer.echo(json.dumps(report))


def _say(text: str) -> None:
    typer.echo(f"nsa-flex generate: {text}", err=True)
