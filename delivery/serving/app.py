"""The HTTP application: routes, authentication, limits, and how refusals look."""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from fastapi import Depends, FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException

from delivery import __version__
from delivery.serving.auth import Authenticator, Principal
from delivery.serving.bodies import described, parsed
from delivery.serving.chat import chat
from delivery.serving.completions import complete
from delivery.serving.documents import extract_text
from delivery.serving.engine_client import EngineClient
from delivery.serving.generation import Generator
from delivery.serving.limits import RateLimiter, read_body
from delivery.serving.metrics import ServerMetrics
from delivery.serving.problem import Problem
from delivery.serving.schema import ChatRequest, CompletionRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from delivery.checkpoint import Tokenizer

log = logging.getLogger("delivery.serving")

UPLOAD_LIMIT_BYTES = 20 * 1024 * 1024
_PAGES = Path(__file__).parent / "pages"
R = TypeVar("R", CompletionRequest, ChatRequest)
_CSP = "default-src 'self'; style-src 'self' 'unsafe-inline'; script-src 'self' 'unsafe-inline'"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a server. Times in seconds, sizes in bytes, rates in requests per minute (0: no limit)."""

    engine: Path
    model_name: str
    engine_options: dict[str, Any] = field(default_factory=dict)
    auth: Authenticator = field(default_factory=Authenticator)
    max_body_bytes: int = 4 * 1024 * 1024
    rate_per_minute: float = 0.0
    max_queue: int = 1024
    drain_timeout_s: float = 30.0


@dataclass
class State:
    """What the running server holds; `draining` turns readiness off before the listener closes."""

    settings: Settings
    tokenizer: Tokenizer
    metrics: ServerMetrics
    limiter: RateLimiter
    engine: EngineClient
    generator: Generator
    draining: bool = False


def create_app(settings: Settings, tokenizer: Tokenizer) -> FastAPI:
    """The application; its lifespan starts and ends the engine process."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        metrics = ServerMetrics(settings.model_name)
        engine = EngineClient(settings.engine, settings.engine_options)
        engine.on_step = metrics.on_step
        generator = Generator(engine, tokenizer, metrics, settings.max_queue)
        limiter = RateLimiter(settings.rate_per_minute)
        app.state.server = State(settings, tokenizer, metrics, limiter, engine, generator)
        loading = asyncio.create_task(_report_load(engine))
        yield
        loading.cancel()
        await engine.close()

    app = FastAPI(title="deliver", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_exception_handler(Problem, _on_problem)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_fault)
    _add_api_routes(app)
    _add_state_routes(app)
    _add_pages(app)
    return app


async def _report_load(engine: EngineClient) -> None:
    ready = await engine.wait_loaded()
    log.info("engine ready after %.1f s, max_model_len %d", ready.load_s, ready.stats.max_model_len)


def _server(request: Request) -> State:
    state: State = request.app.state.server
    return state


async def _caller(request: Request) -> Principal:
    """The authenticated, rate-limited caller of this request."""
    state = _server(request)
    header = request.headers.get("authorization")
    principal = await asyncio.to_thread(state.settings.auth.identify, header)
    if principal is None:
        raise Problem(401, "invalid_api_key", "a valid API key or bearer token is needed")
    host = request.client.host if request.client else "unknown"
    key = principal.name if state.settings.auth.required else host
    if (wait_s := state.limiter.admit(key)) > 0:
        raise Problem(429, "rate_limited", f"too many requests from {key}", retry_after_s=wait_s)
    return principal


Caller = Annotated[Principal, Depends(_caller)]


async def _body(request: Request, kind: type[R]) -> R:
    """The request's body, for the model that is served. Raises Problem."""
    settings = _server(request).settings
    body = parsed(await read_body(request, settings.max_body_bytes), kind)
    if body.model not in (None, settings.model_name):
        message = f"model {body.model!r} is not served here; this is {settings.model_name!r}"
        raise Problem(404, "model_not_found", message, param="model")
    return body


def _add_api_routes(app: FastAPI) -> None:
    @app.post("/v1/completions", openapi_extra=described(CompletionRequest), response_model=None)
    async def completions(request: Request, caller: Caller) -> Response | dict[str, Any]:
        """Continue one or several prompts (texts or token ids)."""
        state = _server(request)
        body = await _body(request, CompletionRequest)
        _check_serving(state)
        return await complete(state.generator, state.settings.model_name, body, request)

    @app.post("/v1/chat/completions", openapi_extra=described(ChatRequest), response_model=None)
    async def chat_completions(request: Request, caller: Caller) -> Response | dict[str, Any]:
        """Answer a conversation through the model's chat template."""
        state = _server(request)
        body = await _body(request, ChatRequest)
        _check_serving(state)
        return await chat(state.generator, state.settings.model_name, body, request)

    @app.get("/v1/models")
    async def models(request: Request, caller: Caller) -> dict[str, Any]:
        """The served model."""
        state = _server(request)
        ready = state.engine.ready
        entry = {
            "id": state.settings.model_name,
            "object": "model",
            "created": 0,
            "owned_by": "deliver",
            "max_model_len": ready.stats.max_model_len if ready else None,
        }
        return {"object": "list", "data": [entry]}

    @app.get("/v1/models/{model:path}")
    async def model(request: Request, model: str, caller: Caller) -> dict[str, Any]:
        """One model by its id."""
        listed = await models(request, caller)
        if model != listed["data"][0]["id"]:
            raise Problem(404, "model_not_found", f"model {model!r} is not served here", param="model")
        entry: dict[str, Any] = listed["data"][0]
        return entry

    @app.post("/v1/documents/text")
    async def document_text(request: Request, caller: Caller) -> dict[str, Any]:
        """The text of an uploaded text or PDF file of at most 20 MB (raw bytes as the body)."""
        body = await read_body(request, UPLOAD_LIMIT_BYTES)
        text = await asyncio.to_thread(extract_text, body, request.headers.get("content-type", ""))
        token_ids = await asyncio.to_thread(_server(request).tokenizer.encode, text)
        return {"text": text, "tokens": len(token_ids)}


def _check_serving(state: State) -> None:
    if state.draining:
        raise Problem(503, "draining", "this server is shutting down", retry_after_s=5)
    if state.engine.ready is None:
        state.generator.check_engine()
        raise Problem(503, "loading", "the model is still loading", retry_after_s=5)


def _add_state_routes(app: FastAPI) -> None:
    @app.get("/health")
    async def health(request: Request) -> JSONResponse:
        """Alive: the engine process is loading or runs. Restart the container when this fails."""
        failure = _server(request).engine.failure
        body = {"status": "failed", "reason": failure.what} if failure else {"status": "alive"}
        return JSONResponse(body, status_code=503 if failure else 200)

    @app.get("/ready")
    async def ready(request: Request) -> JSONResponse:
        """Ready: the model is loaded and the server is not draining."""
        state = _server(request)
        is_ready = state.engine.alive and not state.draining
        body = {"ready": is_ready, "model": state.settings.model_name, "in_flight": state.engine.in_flight}
        return JSONResponse(body, status_code=200 if is_ready else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        """Prometheus text format."""
        state = _server(request)
        content = await asyncio.to_thread(state.metrics.render)
        return Response(content, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/version")
    async def version() -> dict[str, str]:
        """The server's version."""
        return {"version": __version__}


def _add_pages(app: FastAPI) -> None:
    for route, name in (("/", "chat.html"), ("/docs", "api.html")):
        text = (_PAGES / name).read_text("utf-8")

        def page(text: str = text) -> HTMLResponse:
            headers = {"Content-Security-Policy": _CSP, "X-Content-Type-Options": "nosniff"}
            return HTMLResponse(text, headers=headers)

        app.add_api_route(route, page, methods=["GET"], include_in_schema=False)


async def _on_problem(request: Request, problem: Exception) -> JSONResponse:
    assert isinstance(problem, Problem)
    if 400 <= problem.status < 500:
        _server(request).metrics.refused(problem.code)
    return JSONResponse(problem.to_json(), status_code=problem.status, headers=problem.headers())


async def _on_http_exception(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    problem = Problem(error.status_code, "http_error", str(error.detail))
    return JSONResponse(problem.to_json(), status_code=error.status_code, headers=error.headers)


async def _on_fault(request: Request, error: Exception) -> JSONResponse:
    """An internal error: starlette logs the traceback, the client gets the usual error object."""
    problem = Problem(500, "internal_error", "internal server error; see the server's log")
    return JSONResponse(problem.to_json(), status_code=500)
