"""`nsa-flex serve`: transformers' OpenAI-compatible server, with a patched model."""

from __future__ import annotations

import importlib.util
from typing import Annotated

import torch
import typer

from nsa_flex.cli.generate_model import be_quiet
from nsa_flex.cli.options import check_device, dtype_name, fail

DTYPES = {"auto": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PACKAGES = ("transformers", "fastapi", "uvicorn", "openai", "pydantic")


def serve(
    model: Annotated[str, typer.Argument(help="Folder of a checkpoint, or its name on the hub.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "localhost",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free one.")] = 8000,
    num_blocks: Annotated[
        int | None, typer.Option(min=1, help="Pages of the cache; none: what the memory holds.")
    ] = None,
    page_size: Annotated[int, typer.Option(min=4, help="Tokens of a page.")] = 256,
    max_batch_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a pass; longer prompts come in chunks.")
    ] = None,
    memory_share: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Of free memory, for the cache.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …; auto: CUDA if any.")] = "auto",
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}; auto: as saved.")] = "auto",
) -> None:
    """Serve a model that runs NSA to many clients at once (continuous batching).

    Endpoints: /v1/completions, /v1/chat/completions, /v1/responses, /v1/models, /health. A
    checkpoint of an unpatched model is patched on loading (init="dense"), untrained. Each request
    has a temperature and top_p of its own; a field that is not honoured (n, stop, seed, logprobs,
    response_format, penalties) is answered with 400. Exits with 2 if the model cannot be served.

    Example: `nsa-flex serve my-checkpoint --port 8000`
    """
    kind = DTYPES[dtype_name(dtype, DTYPES)]
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        fail(
            "serve",
            f"needs {', '.join(missing)}; install with: pip install 'nsa-flex[cli,hf,serve]'",
        )
    be_quiet()
    from transformers import ContinuousBatchingConfig

    from nsa_flex.cli.serve_app import build_app, run
    from nsa_flex.patching.hf_generation import check_engine

    options = {
        "num_blocks": num_blocks,
        "max_batch_tokens": max_batch_tokens,
        "max_memory_percent": memory_share,
        "page_size": page_size,
    }
    try:
        check_engine()
        app = build_app(model, ContinuousBatchingConfig(**options), check_device(device), kind)
    except (OSError, ValueError) as error:
        fail("serve", str(error), error)
    run(app, host, port)
