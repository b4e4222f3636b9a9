"""`nsa-flex serve`: a server in a process of its own, and OpenAI's client."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from training.small_config import small_config, write_texts
from typer.testing import CliRunner

import nsa_flex
from nsa_flex.cli.app import app
from nsa_flex.patching import hf_generation
from nsa_flex.training.run import train
from patching.tiny_models import NSA, tiny_model

openai: Any = pytest.importorskip("openai")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("transformers.generation.continuous_batching.cache_allocators")

PROMPTS = ["sparse attention", "reads", "sparsely " * 12, "a page of tokens " * 9]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A patched model with a tokenizer of characters, saved."""
    folder = tmp_path_factory.mktemp("served")
    torch.manual_seed(0)
    model = tiny_model("llama", max_position_embeddings=1024)
    nsa_flex.patch(model, NSA).save_pretrained(folder)
    # One token a character: every piece of text that is streamed is whole.
    characters = [*map(chr, range(33, 127)), "Ġ", "Ċ", "ĉ"]  # space, newline, tab
    vocabulary = {character: index for index, character in enumerate(characters)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = (
        "{% for message in messages %}"
        "{% if message['role'] == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
        "{{ message['content'] }}{% endfor %}"
    )
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def client(checkpoint: Path) -> Iterator[Any]:
    """A client of a server that others use too."""
    with served(checkpoint) as (client, _):
        yield client


@contextmanager
def served(
    checkpoint: Path, interrupts: str = "default_int_handler"
) -> Iterator[tuple[Any, subprocess.Popen[str]]]:
    """A client of a server with room for 512 tokens, and its process.

    interrupts: how Python handles them as the process starts.
    """
    main = (
        f"import signal; signal.signal(signal.SIGINT, signal.{interrupts});"
        "from nsa_flex.cli import main; main()"
    )
    command = [sys.executable, "-c", main, "serve", str(checkpoint), "--port", "0"]
    sizes = ["--page-size", "16", "--num-blocks", "32", "--max-batch-tokens", "64"]
    process = subprocess.Popen(
        [*command, *sizes, "--memory-share", "0.5", "--device", "cpu"],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        address = None
        for line in process.stderr:
            if found := re.search(r"listening on (http://\S+)", line):
                address = found[1]
                break
        assert address is not None, "the server did not start"
        with ThreadPoolExecutor(1) as drain:
            drain.submit(process.stderr.read)
            client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
            try:
                yield client, process
            finally:
                process.terminate()
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> dict[str, str]:
    """What `generate` writes after each prompt."""
    model = nsa_flex.load(checkpoint).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    texts = {}
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        out = model.generate(ids, max_new_tokens=12, do_sample=False)
        texts[prompt] = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    return texts


def write(client: Any, checkpoint: Path, prompt: str, **options: Any) -> Any:
    options = {"max_tokens": 12, "temperature": 0, **options}
    return client.completions.create(model=str(checkpoint), prompt=prompt, **options)


def test_an_answer_is_the_text_of_generate(
    client: Any, checkpoint: Path, expected: dict[str, str]
) -> None:
    answer = write(client, checkpoint, PROMPTS[0])
    assert answer.choices[0].text == expected[PROMPTS[0]]
    assert answer.usage.completion_tokens == 12
    assert answer.choices[0].finish_reason == "length"


def test_a_streamed_answer_comes_in_pieces(
    client: Any, checkpoint: Path, expected: dict[str, str]
) -> None:
    pieces = [part.choices[0].text for part in write(client, checkpoint, PROMPTS[1], stream=True)]
    assert "".join(pieces) == expected[PROMPTS[1]]
    assert len([piece for piece in pieces if piece]) > 1


def test_clients_at_once_get_each_their_answer(
    client: Any, checkpoint: Path, expected: dict[str, str]
) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda p: write(client, checkpoint, p), PROMPTS * 2))
    assert [answer.choices[0].text for answer in answers] == [expected[p] for p in PROMPTS * 2]


@pytest.mark.parametrize(
    "interrupts",
    ["SIG_IGN", pytest.param("default_int_handler", marks=pytest.mark.exhaustive)],
    ids=["ignored at the start", "as usual"],
)
def test_one_interrupt_ends_a_server_that_has_answered(checkpoint: Path, interrupts: str) -> None:
    """Also one that a script started with `&`: its shell ignores interrupts for it."""
    with served(checkpoint, interrupts) as (client, process):
        write(client, checkpoint, PROMPTS[0])
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(120) == 128 + signal.SIGINT
        finally:
            process.kill()


def test_a_client_that_goes_away_leaves_the_server_to_others(
    client: Any, checkpoint: Path, expected: dict[str, str]
) -> None:
    # Together they would fill the cache, if those that went away stayed.
    for _ in range(3):
        stream = write(client, checkpoint, PROMPTS[2], stream=True, max_tokens=300)
        next(iter(stream))
        stream.close()
    assert write(client, checkpoint, PROMPTS[3]).choices[0].text == expected[PROMPTS[3]]


def test_a_prompt_too_long_is_answered_with_the_reason(
    client: Any, checkpoint: Path, expected: dict[str, str]
) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=r"the prompt has \d+ tokens, and this"):
            write(client, checkpoint, "page " * 600, stream=stream)
    with pytest.raises(openai.BadRequestError, match="the prompt is empty"):
        write(client, checkpoint, "")
    assert write(client, checkpoint, PROMPTS[0]).choices[0].text == expected[PROMPTS[0]]


def test_chats_and_the_list_of_models(
    client: Any, checkpoint: Path, expected: dict[str, str]
) -> None:
    chat = client.chat.completions.create(
        model=str(checkpoint),
        messages=[{"role": "user", "content": PROMPTS[1]}],
        max_tokens=12,
        temperature=0,
    )
    assert chat.choices[0].message.content == expected[PROMPTS[1]]
    assert [model.id for model in client.models.list()] == [str(checkpoint)]


BAD = {
    "/completions": [
        (
            {"prompt": "a", "max_tokens": 0},
            "max_tokens: Input should be greater than or",
        ),
        ({"prompt": "a", "max_tokens": -3}, "max_tokens: Input should be greater than"),
        ({"prompt": "a", "max_tokens": "many"}, "max_tokens: Input should be a valid integer"),
        (
            {"prompt": "a", "temperature": -0.5},
            "temperature: Input should be greater than",
        ),
        ({"prompt": "a", "top_p": 0}, "top_p: Input should be greater than 0"),
        ({"prompt": ["a"]}, "prompt: Input should be a valid string"),
        ({"prompt": "a", "n": 2}, "n: Input should be 1, got 2"),
        ({"prompt": "a", "logprobs": 3}, "logprobs: Input should be None, got 3"),
        ({"prompt": "a", "seed": 3}, "seed is not supported"),
        ({"prompt": "a", "stop": ["b"]}, "stop is not supported"),
        ({"prompt": "a", "model": "another"}, "another"),
        ({}, "prompt: Field required"),
    ],
    "/chat/completions": [
        ({}, "messages: Field required"),
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": "hello"}, "messages: Input should be a valid list"),
        ({"messages": [{"content": "a"}]}, "messages.0.role: Field required"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "no robots"),
        (
            {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json"}},
            "response_format.type: Input should be 'text'",
        ),
        ({"messages": [{"role": "user", "content": "a"}], "logprobs": True}, "logprobs"),
    ],
    "/responses": [
        ({}, "input: Field required"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens: Input should be greater"),
    ],
}


@pytest.mark.parametrize("endpoint", BAD)
def test_what_a_body_may_not_hold_is_answered_with_400(client: Any, endpoint: str) -> None:
    for body, message in BAD[endpoint]:
        with pytest.raises(openai.BadRequestError) as refused:
            client.post(endpoint, body=body, cast_to=object)
        assert message in refused.value.message
        assert refused.value.type == "invalid_request_error"
        # Whose field it is, a client finds by name.
        assert refused.value.param is None or message.startswith(refused.value.param)


def post(client: Any, content: bytes) -> tuple[int, str]:
    """Status and message of the answer to a body that no client of OpenAI's would send."""
    request = urllib.request.Request(
        f"{client.base_url}completions", content, {"Content-Type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=60)
    return refused.value.code, json.load(refused.value)["error"]["message"]


@pytest.mark.parametrize("body", [b"{", b"[]", b'"prompt"', b"\xff"])
def test_a_body_that_is_no_json_object_is_answered_with_400(client: Any, body: bytes) -> None:
    status, message = post(client, body)
    assert status == 400
    assert message in ("the body must be a JSON object", "There was an error parsing the body")


def test_a_body_too_large_is_answered_with_413(client: Any) -> None:
    large = b'{"prompt": "' + b"a" * (16 << 20) + b'"}'
    assert post(client, large) == (413, "the body has more than 16777216 bytes")


def test_sampling_options_hold_for_their_request_alone(
    client: Any, checkpoint: Path, expected: dict[str, str]
) -> None:
    wild = [write(client, checkpoint, PROMPTS[0], temperature=2.0) for _ in range(3)]
    assert write(client, checkpoint, PROMPTS[0]).choices[0].text == expected[PROMPTS[0]]
    texts = {answer.choices[0].text for answer in wild}
    assert len(texts) > 1
    # A tiny nucleus is the likeliest token, whatever the temperature.
    narrow = write(client, checkpoint, PROMPTS[0], temperature=2.0, top_p=1e-6)
    assert narrow.choices[0].text == expected[PROMPTS[0]]


def test_a_hot_request_and_a_greedy_one_in_one_batch(
    client: Any, checkpoint: Path, expected: dict[str, str]
) -> None:
    """The hot one is under way while the greedy one, of the same prompt, begins and ends."""
    begun = Event()

    def hot() -> str:
        pieces = []
        options = {"temperature": 2.0, "max_tokens": 200, "stream": True}
        for part in write(client, checkpoint, PROMPTS[0], **options):
            pieces.append(part.choices[0].text)
            begun.set()
        begun.set()
        return "".join(pieces)

    with ThreadPoolExecutor(1) as pool:
        for _ in range(20):  # it may end itself at any token
            begun.clear()
            wild = pool.submit(hot)
            assert begun.wait(60)
            answer = write(client, checkpoint, PROMPTS[0])
            is_under_way = not wild.done()
            assert answer.choices[0].text == expected[PROMPTS[0]]
            assert not wild.result().startswith(expected[PROMPTS[0]])
            if is_under_way:
                return
    raise AssertionError("the two were in no batch together")


def test_a_response_streams_where_it_is_asked_to(
    client: Any, checkpoint: Path, expected: dict[str, str]
) -> None:
    options = {"model": str(checkpoint), "input": PROMPTS[1], "max_output_tokens": 12}
    whole = client.responses.create(**options, temperature=0)
    assert whole.output_text == expected[PROMPTS[1]]
    pieces = [
        event.delta
        for event in client.responses.create(**options, temperature=0, stream=True)
        if event.type == "response.output_text.delta"
    ]
    assert "".join(pieces) == expected[PROMPTS[1]]


@pytest.mark.exhaustive
def test_what_train_writes_is_served(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts")
    train(small_config(tmp_path / "run", texts, training={"steps": 2}))
    model = tmp_path / "run" / "model"
    with served(model) as (client, _):
        answer = write(client, model, "the sparse branch", max_tokens=3)
    assert answer.usage.completion_tokens in (1, 2, 3)
    assert answer.usage.prompt_tokens == len("the sparse branch")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--page-size", "18"], "page_size=18 must be a multiple of compress_stride=4"),
        (["--device", "cuda:99"], "cuda:99"),
    ],
)
def test_what_cannot_be_served_ends_with_2(
    checkpoint: Path, options: list[str], message: str
) -> None:
    result = CliRunner().invoke(app, ["serve", str(checkpoint), *options], prog_name="nsa-flex")
    assert result.exit_code == 2
    assert message in result.output


def test_an_engine_that_is_too_old_ends_with_2(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_generation, "has_page_allocators", lambda: False)
    result = CliRunner().invoke(app, ["serve", str(checkpoint)], prog_name="nsa-flex")
    assert result.exit_code == 2
    assert "5.19 or later: upgrade transformers" in " ".join(result.output.split())


def test_a_checkpoint_without_a_tokenizer_ends_with_2(tmp_path: Path) -> None:
    model: Any = tiny_model("llama", vocab_size=256)
    nsa_flex.patch(model, NSA).save_pretrained(tmp_path)
    result = CliRunner().invoke(app, ["serve", str(tmp_path)], prog_name="nsa-flex")
    assert result.exit_code == 2
    assert "has no tokenizer, which a server needs" in " ".join(result.output.split())
