"""The parts of transformers' server, put together around a patched model."""

from __future__ import annotations

import asyncio
import copy
import signal
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, ClassVar

import torch
import typer
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from jinja2 import TemplateError
from pydantic import BaseModel
from starlette.exceptions import HTTPException as StarletteHTTPException
from torch import Tensor
from transformers import AutoTokenizer, ContinuousBatchingConfig
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import CBGenerateManager, GenerationState
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingTemperatureLogitsWarper,
)

from nsa_flex.cli.generate_model import load
from nsa_flex.cli.serve_bodies import ChatBody, CompletionBody, ResponseBody, problem_of
from nsa_flex.patching.hf_generation import check_batching
from nsa_flex.patching.hf_versions import other_serving_handlers

MAX_BODY_BYTES = 16 << 20


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
    batching.per_request_processors = True  # a request's sampling options are its own
    state = _State(continuous_batching=True, cb_config=batching)
    app = build_server(
        models,
        _Chat(model_manager=models, generation_state=state),
        completion_handler=_Completion(model_manager=models, generation_state=state),
        response_handler=_Response(model_manager=models, generation_state=state),
        generation_state=state,
        **other_serving_handlers(models, state),
    )
    app.add_exception_handler(StarletteHTTPException, _answer_error)  # FastAPI's own, too
    app.add_exception_handler(RequestValidationError, _answer_no_json)
    app.add_middleware(_BodyLimit)
    app.state.generation = state
    return app


async def _answer_error(_request: Request, error: Any) -> JSONResponse:
    """A refusal as OpenAI's clients read it."""
    detail = error.detail
    message, field = detail if isinstance(detail, tuple) else (detail, None)
    return _error(error.status_code, message, field)


async def _answer_no_json(_request: Request, _error_of_parsing: Any) -> JSONResponse:
    return _error(400, "the body must be a JSON object")


def _error(status: int, message: str, field: str | None = None) -> JSONResponse:
    content = {"message": message, "type": "invalid_request_error", "param": field, "code": None}
    return JSONResponse({"error": content}, status_code=status)


class _BodyLimit:
    """Answers 413 to bodies of more than `MAX_BODY_BYTES`, read no further than that."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Callable[[], Awaitable[Any]], send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return  # the client has gone
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > MAX_BODY_BYTES:
                answer = _error(413, f"the body has more than {MAX_BODY_BYTES} bytes")
                await answer(scope, receive, send)
                return
        is_read = False

        async def replay() -> Any:
            nonlocal is_read
            if is_read:
                return await receive()
            is_read = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, replay, send)


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


class _Checked:
    """A handler whose bodies are checked first, and sample by temperature and top_p."""

    body: ClassVar[type[BaseModel]]

    def _validate_request(self, body: dict[str, Any]) -> None:
        """As transformers' own, with 400 and the reason."""
        problem = problem_of(body, self.body)
        if problem is not None:
            raise HTTPException(400, problem)

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        """As transformers' own."""
        try:
            return await super().handle_request(body, request_id)  # type: ignore[misc]
        except TemplateError as error:
            raise HTTPException(400, f"the chat template refuses the messages: {error}") from error

    def _build_generation_config(self, body: dict[str, Any], default: Any, **options: Any) -> Any:
        """As transformers' own; whether there is sampling follows from the temperature."""
        built = super()._build_generation_config(body, default, **options)  # type: ignore[misc]
        if body.get("temperature") is not None:
            built.do_sample = body["temperature"] > 0
        elif body.get("top_p") is not None:
            built.do_sample = True
        return built


class _Completion(_Checked, CompletionHandler):
    body = CompletionBody


class _Chat(_Checked, ChatCompletionHandler):
    body = ChatBody

    def _validate_request(self, body: dict[str, Any]) -> None:
        super()._validate_request(body)
        _, _, tokenizer = self._resolve_model(body)
        if tokenizer.chat_template is None:
            raise HTTPException(400, "the model's tokenizer has no chat template: use completions")


class _Response(_Checked, ResponseHandler):
    body = ResponseBody

    def _validate_request(self, body: dict[str, Any]) -> None:
        super()._validate_request(body)
        if body.get("stream") is None:
            body["stream"] = False  # as OpenAI's; transformers' default is to stream


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


class _Temperature(ContinuousBatchingTemperatureLogitsWarper):
    """Temperatures by request, of which 0 leaves the highest logit alone, the first of equals."""

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        """As transformers' own."""
        temperature = tensor_arg[: scores.shape[0]].view(torch.float32)[:, None]
        best = torch.zeros_like(scores, dtype=torch.bool)
        best.scatter_(-1, scores.argmax(-1, keepdim=True), True)
        greedy = scores.masked_fill(~best, float("-inf"))
        return torch.where(temperature > 0, scores / temperature.clamp(min=1e-4), greedy)


# temperature and top_p of the request that is being queued
_sampling: ContextVar[dict[str, float]] = ContextVar("_sampling")


class _Generator(CBGenerateManager):
    """Requests with sampling options of their own.

    Answers a prompt that is too long with 400 and the reason; the engine never sees it.
    """

    _cb: Any

    def init_cb(self, model: Any, gen_config: Any) -> None:
        """As transformers' own, but for options: the engine's are there to be set by requests."""
        if self._cb is not None:
            return
        shared = copy.deepcopy(gen_config)
        # Values that make transformers put the processors there; every request brings its own.
        shared.do_sample, shared.temperature, shared.top_p, shared.top_k = True, 0.5, 0.5, None
        self._cb = model.init_continuous_batching(
            generation_config=shared, continuous_batching_config=self._cb_config
        )
        processors = self._cb.logit_processor.logits_processor
        for processor in processors:
            if isinstance(processor, ContinuousBatchingTemperatureLogitsWarper):
                processor.__class__ = _Temperature
        add = self._cb.add_request
        self._cb.add_request = lambda *args, **options: add(*args, **options, **_sampling.get())
        self._cb.start()

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """As transformers' own."""
        self._prepare(inputs, gen_config)
        return super().generate_streaming(model, processor, inputs, gen_config, *args, **kwargs)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """As transformers' own."""
        self._prepare(inputs, gen_config)
        return await super().generate_non_streaming(
            model, processor, inputs, gen_config, *args, **kwargs
        )

    def _prepare(self, inputs: Any, gen_config: Any) -> None:
        """Ask for no more new tokens than there is room for; note the sampling options."""
        is_greedy = not gen_config.do_sample
        temperature = 1.0 if gen_config.temperature is None else float(gen_config.temperature)
        top_p = 1.0 if gen_config.top_p is None else float(gen_config.top_p)
        _sampling.set({"temperature": 0.0 if is_greedy else temperature, "top_p": top_p})
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
