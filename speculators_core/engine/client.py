"""Talk to a vLLM server: generate many, render, count.

Errors say who is at fault: RequestError for one request that the server refuses, EngineTimeout when it does not
answer in time, EngineError when it is dead (seen at once, not waited for).
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
from pydantic import Field, model_validator

from speculators_core.engine.metrics import SpecDecodeCounters, read_spec_decode
from speculators_core.errors import EngineError, EngineTimeout
from speculators_core.types import Json, StrictModel

logging.getLogger("httpx").setLevel(logging.WARNING)  # it reports every request at INFO: thousands of lines
NOBODYS = {"x-draftsmith-consent": "no"}
"""No user stands behind our own requests: the sampler of served traffic keeps none of them."""
_ATTEMPTS = 4
_BACKOFF_S = 0.25
_DYING_S = 5.0
_KEEPALIVE_S = 4.0  # below uvicorn's 5 s, so that we rarely write into a connection that is being closed
_AHEAD = 4
_TRANSIENT = {408, 429, 502, 503, 504}


class GenerationRequest(StrictModel):
    """One prompt, as token ids or as chat messages, and how to continue it."""

    id: str = Field(description="key of the result")
    prompt_token_ids: tuple[int, ...] | None = Field(None, description="prompt as tokens, sent as they are")
    messages: Json = Field(None, description="prompt as chat messages, rendered by the server's template")
    tools: Json = Field(None, description="tools for the template")
    template_kwargs: dict[str, Json] | None = Field(None, description="keyword arguments of the chat template")
    max_tokens: int = Field(ge=1, description="tokens to generate at most")
    temperature: float = Field(0.0, ge=0, description="0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus")
    seed: int | None = Field(None, description="seed of this request's sampling")
    stop_token_ids: tuple[int, ...] = Field((), description="further tokens to stop at")
    ignore_eos: bool = Field(False, description="go on to max_tokens")
    kv_transfer_params: dict[str, Json] | None = Field(None, description="for the connector")
    logprobs: int | None = Field(None, ge=0, description="log-probabilities of this many best tokens a position")

    @model_validator(mode="after")
    def _exactly_one_prompt(self) -> GenerationRequest:
        if (self.prompt_token_ids is None) == (self.messages is None):
            raise ValueError("a request needs exactly one of `prompt_token_ids` and `messages`")
        return self


class Generation(StrictModel):
    """What a server made of one request."""

    id: str = Field(description="the request's")
    prompt_token_ids: tuple[int, ...] = Field(description="the prompt as the model saw it")
    token_ids: tuple[int, ...] = Field(description="generated tokens, the stop token included")
    text: str = Field(description="generated text without special tokens")
    finish_reason: str | None = Field(description="stop, length, …")
    kv_transfer_params: Json = Field(None, description="the connector's answer")
    logprobs: Json = Field(None, description="as vLLM reports them; tokens appear as token_id:N")
    spec_metrics: Json = Field(None, description="this request's acceptance: see `ServerSpec.per_request_metrics`")


class RequestError(EngineError):
    """The server refused one request; others are not concerned.

    request_id: the request's · status: HTTP status.
    """

    def __init__(self, what: str, *, mend: str | None = None, request_id: str = "", status: int = 0) -> None:
        super().__init__(what, mend=mend)
        self.request_id = request_id
        self.status = status


class EngineClient:
    """Client of one server; usable from several threads. `check` raises when the server's process is dead."""

    def __init__(
        self,
        base_url: str,
        *,
        timeout_s: float = 120,
        check: Callable[[], None] | None = None,
        api_key: str | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._check = check or (lambda: None)
        self._local = check is not None
        self._model_name: str | None = None
        self._http = httpx.Client(
            base_url=self.base_url,
            timeout=httpx.Timeout(timeout_s, connect=10, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEEPALIVE_S),
            headers=NOBODYS if api_key is None else {**NOBODYS, "Authorization": f"Bearer {api_key}"},
            trust_env=False,  # a proxy must not come between us and loopback
        )

    def __enter__(self) -> EngineClient:
        """Itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """Close the connections; requests in flight fail."""
        self._http.close()

    def model_names(self) -> tuple[str, ...]:
        """Every name under which the server offers its model."""
        return tuple(str(model["id"]) for model in self._json("GET", "/v1/models")["data"])

    def model_name(self) -> str:
        """The first of them."""
        if self._model_name is None:
            self._model_name = self.model_names()[0]
        return self._model_name

    def health(self) -> bool:
        """Whether the server says that it is well; False also when nobody answers."""
        try:
            return self._http.get("/health", timeout=5).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def render(
        self,
        messages: Json,
        *,
        tools: Json = None,
        template_kwargs: Mapping[str, Json] | None = None,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        """Token ids that the server makes of a conversation with its own chat template."""
        body = self._chat_body(messages, tools, template_kwargs) | {"add_generation_prompt": add_generation_prompt}
        if isinstance(messages, Sequence) and not add_generation_prompt:
            body["continue_final_message"] = False
        answer = self._json("POST", "/v1/chat/completions/render", body)
        return [int(token) for token in answer["token_ids"]]

    def counters(self) -> SpecDecodeCounters:
        """Totals of speculative decoding since the server's start; zeros when it does not speculate."""
        return read_spec_decode(self.metrics())

    def metrics(self) -> str:
        """The server's Prometheus text."""
        return self._send("GET", "/metrics").text

    def greedy_gaps(self, token_ids: Sequence[int], start: int) -> list[float]:
        """How far (nats) the model's best token lies above each token from index `start` on; 0.0 where it is the best.

        The model reads the whole text at once, and no draft takes part.
        """
        body: Json = {"model": self.model_name(), "prompt": list(token_ids), "max_tokens": 1, "prompt_logprobs": 1}
        positions = self._json("POST", "/v1/completions", body)["choices"][0]["prompt_logprobs"]
        found = zip(token_ids[start:], positions[start:], strict=True)
        return [max(one["logprob"] for one in best.values()) - best[str(token)]["logprob"] for token, best in found]

    def ask(self, request: GenerationRequest) -> Generation:
        """Generate for one request, in the calling thread. RequestError, EngineTimeout or EngineError as above."""
        return self._generate(request)

    def generate(
        self,
        requests: Iterable[GenerationRequest],
        *,
        concurrency: int,
        on_result: Callable[[Generation], None] | None = None,
        on_error: Callable[[RequestError], None] | None = None,
    ) -> Iterator[Generation]:
        """Generate for every request, `concurrency` at a time, and yield the results in the requests' order.

        Lazy: `requests` is read a little ahead of what was yielded, so memory stays bounded. `on_result` is called
        in the order of completion, from worker threads. A refused request raises RequestError when its turn comes, or
        goes to `on_error` and is left out. Raises EngineError as soon as the server is dead.
        """
        pending: deque[Future[Generation]] = deque()
        pool = ThreadPoolExecutor(concurrency, thread_name_prefix="generate")

        def work(request: GenerationRequest) -> Generation:
            result = self._generate(request)
            if on_result is not None:
                on_result(result)
            return result

        def next_result() -> Iterator[Generation]:
            try:
                yield pending.popleft().result()
            except RequestError as error:
                if on_error is None:
                    raise
                on_error(error)

        try:
            for request in requests:
                pending.append(pool.submit(work, request))
                if len(pending) >= _AHEAD * concurrency:
                    yield from next_result()
            while pending:
                yield from next_result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # what is in flight ends with the server, or by its timeout
            raise
        pool.shutdown()

    def _generate(self, request: GenerationRequest) -> Generation:
        body: dict[str, Any] = {
            "model": self.model_name(),
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "ignore_eos": request.ignore_eos,
            "stop_token_ids": list(request.stop_token_ids),
            "return_token_ids": True,
        }
        if request.seed is not None:
            body["seed"] = request.seed
        if request.kv_transfer_params is not None:
            body["kv_transfer_params"] = request.kv_transfer_params
        if request.logprobs is not None:
            body["return_tokens_as_token_ids"] = True
        if request.prompt_token_ids is not None:
            if request.logprobs is not None:
                body["logprobs"] = request.logprobs
            answer = self._json(
                "POST", "/v1/completions", body | {"prompt": list(request.prompt_token_ids)}, request_id=request.id
            )
        else:
            if request.logprobs is not None:
                body |= {"logprobs": True, "top_logprobs": request.logprobs}
            body |= self._chat_body(request.messages, request.tools, request.template_kwargs)
            answer = self._json("POST", "/v1/chat/completions", body, request_id=request.id)
        return _read_generation(request, answer)

    def _chat_body(self, messages: Json, tools: Json, template_kwargs: Mapping[str, Json] | None) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model_name(), "messages": messages}
        if tools:
            # the template still sees the tools; "auto" needs a parser that the server was not started with
            body |= {"tools": tools, "tool_choice": "none"}
        if template_kwargs:
            body["chat_template_kwargs"] = dict(template_kwargs)
        return body

    def _json(self, method: str, path: str, body: Json = None, *, request_id: str = "") -> dict[str, Any]:
        response = self._send(method, path, body, request_id=request_id)
        try:
            answer: dict[str, Any] = response.json()
        except json.JSONDecodeError as error:
            raise EngineError(f"{self.base_url}{path} answered something that is not JSON") from error
        return answer

    def _send(self, method: str, path: str, body: Json = None, *, request_id: str = "") -> httpx.Response:
        """One request; tried again where that can help: a busy server, a dropped connection, never a refusal."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                response = self._http.request(method, path, json=body)
            except (httpx.ReadTimeout, httpx.WriteTimeout) as error:
                self._check()
                raise EngineTimeout(
                    f"{self.base_url}{path} did not answer in time{_named(request_id)}",
                    mend="raise the client's timeout, or lower the concurrency or max_tokens",
                ) from error
            except httpx.TransportError as error:
                self._raise_if_dying()
                if attempt == _ATTEMPTS:
                    raise EngineError(
                        f"the server at {self.base_url} cannot be reached ({type(error).__name__}: {error})",
                        mend="see whether it runs, and whether its address is right",
                    ) from error
            else:
                if response.is_success:
                    return response
                if response.status_code not in _TRANSIENT or attempt == _ATTEMPTS:
                    raise self._refusal(response, path, request_id)
            time.sleep(_BACKOFF_S * 2 ** (attempt - 1))
        raise AssertionError("unreachable")

    def _refusal(self, response: httpx.Response, path: str, request_id: str) -> EngineError:
        """The error for an answer that is no success; a server error may be a dying engine's last words."""
        if response.is_server_error:
            self._raise_if_dying()
        message = _message(response)
        if response.status_code == httpx.codes.FORBIDDEN and path.endswith("/render"):
            return RequestError(
                f"{self.base_url}{path} is closed: {message}",
                mend="start the server with --enable-scale-out",
                request_id=request_id,
                status=403,
            )
        return RequestError(
            f"{self.base_url}{path} refused{_named(request_id)} (HTTP {response.status_code}): {message}",
            request_id=request_id,
            status=response.status_code,
        )

    def _raise_if_dying(self) -> None:
        """Raise when our server's process has ended, or ends within moments (its engine died before it did)."""
        self._check()
        if not self._local or self.health():
            return
        deadline = time.monotonic() + _DYING_S
        while time.monotonic() < deadline:
            time.sleep(0.1)
            self._check()
            if self.health():
                return


def _read_generation(request: GenerationRequest, answer: Mapping[str, Any]) -> Generation:
    try:
        choice = answer["choices"][0]
        chat = request.messages is not None
        prompt = answer.get("prompt_token_ids") if chat else choice.get("prompt_token_ids")
        return Generation(
            id=request.id,
            prompt_token_ids=tuple(prompt or request.prompt_token_ids or ()),
            token_ids=tuple(choice["token_ids"] or ()),
            text=(choice["message"].get("content") or "") if chat else choice["text"],
            finish_reason=choice.get("finish_reason"),
            kv_transfer_params=answer.get("kv_transfer_params"),
            logprobs=choice.get("logprobs"),
            spec_metrics=(answer.get("metrics") or {}).get("speculative_decoding"),
        )
    except (KeyError, IndexError, TypeError) as error:
        raise EngineError(
            f"the server's answer to {request.id!r} has another form than expected ({type(error).__name__}: {error})",
            mend="a server that is not vLLM, or a version that we have not met",
        ) from error


def _message(response: httpx.Response) -> str:
    try:
        document = response.json()
        error = document.get("error", document)
        return str(error.get("message", error))[:1000] if isinstance(error, dict) else str(error)[:1000]
    except (json.JSONDecodeError, AttributeError):
        return response.text[:1000]


def _named(request_id: str) -> str:
    return f" request {request_id!r}" if request_id else ""
