"""The parts of transformers' server, put together around a patched model."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import torch
import typer
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from transformers import AutoTokenizer, ContinuousBatchingConfig
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.server import build_server
from transformers.cli.serving.systemone import SystemOneHandler
from transformers.cli.serving.transcription import TranscriptionHandler
from transformers.cli.serving.utils import CBGenerateManager, GenerationState

from nsa_flex.cli.generate_model import load
from nsa_flex.patching.hf_batching import check_batching


def build_app(
    path: str,
    batching: ContinuousBatchingConfig,
    device: torch.device,
    dtype: torch.dtype | None,
) -> FastAPI:
    """transformers' server, pinned to one model that runs NSA.

    Raises:
        ValueError: the checkpoint cannot be loaded, has no tokenizer, or cannot be batched.
    """
    models = _Models(path, device, dtype)
    model, _ = models.load_model_and_processor(models.process_model_name(path))
    check_batching(model, batching)
    state = _State(continuous_batching=True, cb_config=batching)
    app = build_server(
        models,
        ChatCompletionHandler(model_manager=models, generation_state=state),
        completion_handler=CompletionHandler(model_manager=models, generation_state=state),
        response_handler=ResponseHandler(model_manager=models, generation_state=state),
        transcription_handler=TranscriptionHandler(models, state),
        systemone_handler=SystemOneHandler(model_manager=models, generation_state=state),
        generation_state=state,
    )
    app.add_exception_handler(HTTPException, _answer_error)
    app.state.generation = state
    return app


async def _answer_error(_request: Request, error: Any) -> JSONResponse:
    """A refusal as OpenAI's clients read it."""
    content = {"message": error.detail, "type": "invalid_request_error"}
    return JSONResponse({"error": content}, status_code=error.status_code)


def run(app: FastAPI, host: str, port: int) -> None:
    """Serve until interrupted; prints the address once it listens."""
    # A shell starts background jobs with interrupts ignored. uvicorn takes them all the same, and
    # would then end with 0.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        asyncio.run(_run(app, host, port))
    finally:  # its thread would keep the process
        app.state.generation.shutdown()


async def _run(app: FastAPI, host: str, port: int) -> None:
    server = uvicorn.Server(uvicorn.Config(app, host=host, port=port, log_level="warning"))
    serving = asyncio.create_task(server.serve())
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    for listening in server.servers if server.started else ():
        for socket in listening.sockets[:1]:
            found = socket.getsockname()[1]
            typer.echo(f"nsa-flex serve: listening on http://{host}:{found}", err=True)
    await serving


class _Models(ModelManager):
    """Loads the one model, patched."""

    def __init__(self, path: str, device: torch.device, dtype: torch.dtype | None) -> None:
        self.load_device, self.load_dtype = device, dtype
        self.path = path
        super().__init__(force_model=path, continuous_batching=True)

    def _load_processor(self, model_id_and_revision: str, **_options: Any) -> Any:
        try:
            return AutoTokenizer.from_pretrained(self.path)
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.path} has no tokenizer, which a server needs") from error

    def _load_model(self, model_id_and_revision: str, **_options: Any) -> Any:
        return load(self.path, self.load_device, self.load_dtype).model

    def get_gen_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:
        """The one model, as /v1/models lists it."""
        return [{"id": self.path, "object": "model", "created": 0, "owned_by": "nsa_flex"}]


class _State(GenerationState):
    """Makes generators that look at the length of a request before they queue it."""

    _cb_manager: Any

    def get_manager(self, model_id: str, use_cb: bool = False) -> Any:
        """As transformers' own."""
        if use_cb and self._cb_manager is None:
            self._cb_manager = _Generator(cb_config=self._cb_config)
            self._cb_model_id = model_id
        return super().get_manager(model_id, use_cb=use_cb)


class _Generator(CBGenerateManager):
    """Answers a prompt that is too long with 400 and the reason; the engine never sees it."""

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """As transformers' own."""
        self._fit(inputs, gen_config)
        return super().generate_streaming(model, processor, inputs, gen_config, *args, **kwargs)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """As transformers' own."""
        self._fit(inputs, gen_config)
        return await super().generate_non_streaming(
            model, processor, inputs, gen_config, *args, **kwargs
        )

    def _fit(self, inputs: Any, gen_config: Any) -> None:
        """Ask for no more new tokens than there is room for."""
        assert self._cb is not None
        prompt, limit = len(inputs["input_ids"]), self._cb.max_request_tokens()
        if prompt == 0:
            raise HTTPException(400, "the prompt is empty")
        if prompt > limit:
            raise HTTPException(
                400, f"the prompt has {prompt} tokens, and this server takes at most {limit}"
            )
        # The last new token needs no room.
        gen_config.max_new_tokens = min(gen_config.max_new_tokens or limit, limit - prompt + 1)
