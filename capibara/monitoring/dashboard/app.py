"""The application: addresses, their parameters, and what is answered."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from capibara import __version__
from capibara.core.types import UserError
from capibara.monitoring.dashboard import prometheus
from capibara.monitoring.dashboard.http import static_files
from capibara.monitoring.dashboard.http.access import Access, Guarded, Refusal
from capibara.monitoring.dashboard.http.answers import Answers, json_bytes
from capibara.monitoring.dashboard.http.hub import EventStream
from capibara.monitoring.dashboard.search import Search
from capibara.monitoring.dashboard.state import Dashboard
from capibara.monitoring.dashboard.views import comparison, consensus, files, plan, summary
from capibara.monitoring.dashboard.views import series as lines
from capibara.monitoring.dashboard.views.names import Json, clean
from capibara.monitoring.reading.run import Run

_MOST_SERIES, _MOST_RUNS, _MOST_COMPARED = 40, 20, 20
_POINTS = (10, 5_000)
MOMENT_S = 1.0
_MOST_LISTED = 1_000

_Handler = Callable[[Request, Exception], Awaitable[Response]]


def app(dashboard: Dashboard, access: Access) -> ASGIApp:
    """The application, behind the checks of who may ask."""
    pages = _Pages(dashboard, access)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        dashboard.start()
        yield
        dashboard.stop()

    routes = [
        Route("/", pages.index),
        Route("/favicon.ico", pages.icon),
        Route("/static/{name}", pages.static),
        Route("/health", pages.health),
        Route("/metrics", pages.metrics),
        Route("/api/info", pages.info),
        Route("/api/runs", pages.runs),
        Route("/api/runs/{run}", pages.details),
        Route("/api/runs/{run}/image/{name}", pages.image),
        Route("/api/runs/{run}/{part}", pages.part),
        Route("/api/series", pages.series),
        Route("/api/compare", pages.compare),
        Route("/api/alerts", pages.alerts),
        Route("/api/export.csv", pages.export),
        Route("/api/events", pages.events),
    ]
    handlers: dict[int | type[Exception], _Handler] = {Refusal: _refused, 404: _missing, Exception: _failed}
    return Guarded(Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan), access)


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return error.response()


async def _missing(_: Request, error: Exception) -> Response:
    return Refusal(404, "there is nothing at this address", "not_found").response()


async def _failed(_: Request, error: Exception) -> Response:
    return Refusal(500, "this could not be answered", "failed").response()


class _Pages:
    """The answers to requests; what takes time is done in a thread."""

    def __init__(self, dashboard: Dashboard, access: Access):
        self._all, self._access, self._answers = dashboard, access, Answers()

    async def index(self, request: Request) -> Response:
        return static_files.file("index.html", request.headers)

    async def icon(self, request: Request) -> Response:
        return static_files.file("favicon.svg", request.headers)

    async def static(self, request: Request) -> Response:
        return await run_in_threadpool(static_files.file, request.path_params["name"], request.headers)

    async def health(self, _: Request) -> Response:
        return _json({"status": "ok"})

    async def metrics(self, _: Request) -> Response:
        text = await run_in_threadpool(prometheus.page, self._all)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def info(self, _: Request) -> Response:
        return _json({
            "version": __version__,
            "now": time.time(),
            "auth": self._access.token is not None,
            "roots": list(self._all.roots),
            "faults": list(self._all.faults),
            "poll_s": 1.0,
            "charts": static_files.has_charts(),
        })  # fmt: skip

    async def runs(self, request: Request) -> Response:
        search, within = request.query_params.get("search", ""), request.query_params.get("within", "name")
        limit = int(_number(request, "limit", 500, 1, _MOST_LISTED))
        offset = int(_number(request, "offset", 0, 0, 1e6))
        order = _one_of(request, "sort", ("updated", "name", "step", "loss"))

        def make() -> Json:
            result = self._all.runs
            total = len(result)
            if search:
                result = _searched(result, search, within)
            rows = sorted(map(self._all.summary, result), key=_order(order))
            return {"total": total, "matched": len(rows), "runs": list(rows[offset : offset + limit])}

        stamp = tuple((run.id, run.version, run.is_loading) for run in self._all.runs), int(time.time() / 5)
        return await self._answer(request, stamp, make)

    async def details(self, request: Request) -> Response:
        run = self._run(request.path_params["run"])
        await _shown([run])
        return await self._answer(request, _stamp([run]), lambda: self._details(run))

    def _details(self, run: Run) -> Json:
        about = summary.details(run, self._all.board.rules.quiet, self._all.board.active(run.id))
        return {**about, "images": list(files.pictures(run))}

    async def part(self, request: Request) -> Response:
        run, part = self._run(request.path_params["run"]), request.path_params["part"]
        make: Callable[[], Json]
        match part:
            case "config":
                make = lambda: files.configuration(run)  # noqa: E731
            case "samples":
                prompt = request.query_params.get("prompt")
                before = _optional(request, "before")
                limit = int(_number(request, "limit", 20, 1, 100))
                make = lambda: files.samples(run, prompt, before, limit)  # noqa: E731
            case "goodput":
                make = lambda: summary.goodput(run)  # noqa: E731
            case "nodes" if await run_in_threadpool(consensus.exchange_of, run) is not None:
                return _json(await run_in_threadpool(self._all.facts.ask, "group", run))
            case "nodes":
                make = lambda: consensus.nodes(run)  # noqa: E731
            case "experts":
                points = int(_number(request, "points", 200, 10, 1_000))
                make = lambda: consensus.experts(run, points)  # noqa: E731
            case "checkpoints" | "lineage":
                return _json(await run_in_threadpool(self._all.facts.ask, part, run))
            case "plan":
                answer = await run_in_threadpool(self._all.facts.ask, part, run)
                return _json(plan.compared(run, answer))
            case _:
                raise Refusal(404, "there is nothing at this address", "not_found")
        return await self._answer(request, _stamp([run]), make)

    async def image(self, request: Request) -> Response:
        run = self._run(request.path_params["run"])
        result = await run_in_threadpool(files.picture, run, request.path_params["name"])
        if result is None:
            raise Refusal(404, "there is no such picture", "not_found")
        return Response(result[0], media_type=result[1], headers={"Cache-Control": "no-cache"})

    async def series(self, request: Request) -> Response:
        runs, query = self._asked(request)
        await _shown(runs)
        return await self._answer(request, _stamp(runs), lambda: lines.series(runs, query))

    async def compare(self, request: Request) -> Response:
        runs = self._runs(request)
        if not 1 <= len(runs) <= _MOST_COMPARED:
            raise Refusal(400, f"{len(runs)} runs are compared, must be 1 to {_MOST_COMPARED}", "bad_parameter")
        await _shown(runs)
        return await self._answer(request, _stamp(runs), lambda: self._compared(runs))

    def _compared(self, runs: Sequence[Run]) -> Json:
        rows: list[Json] = [self._all.summary(run) for run in runs]
        return {"runs": rows, "metrics": comparison.metrics(runs), "config": comparison.configurations(runs)}

    async def alerts(self, request: Request) -> Response:
        only = request.query_params.get("active", "0") == "1"
        result = self._all.board.all(request.query_params.get("run"), only_active=only)
        rules = self._all.board.rules.as_json()
        rows: list[Json] = [alert.as_json() for alert in result[:_MOST_LISTED]]
        return _json({"alerts": rows, "rules": rules, "webhooks": len(self._all.webhooks.urls)})

    async def export(self, request: Request) -> Response:
        runs, query = self._asked(request)
        if request.method == "HEAD":
            return Response(media_type="text/csv; charset=utf-8")
        for run in runs:
            if run.is_coarse:
                fix = "try again in a moment" if run.is_loading else "try again, or raise DashboardConfig.memory_mib"
                raise Refusal(503, f"not all lines of {clean(run.name)} are in memory: {fix}", "not_ready")
        headers = {"Content-Disposition": 'attachment; filename="metrics.csv"'}
        return StreamingResponse(lines.csv(runs, query), media_type="text/csv; charset=utf-8", headers=headers)

    async def events(self, request: Request) -> Response:
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        self._all.hub.check_room()
        wanted = request.query_params.getlist("run")[:_MOST_LISTED]
        hello: dict[str, Json] = {"now": time.time(), "version": __version__}
        return EventStream(self._all.hub, wanted, hello)

    async def _answer(self, request: Request, stamp: object, make: Callable[[], Json]) -> Response:
        key = f"{request.url.path}?{request.url.query}"
        return await run_in_threadpool(self._answers.answer, key, stamp, make, request.headers)

    def _run(self, run_id: str) -> Run:
        run = self._all.run(run_id)
        if run is None:
            raise Refusal(404, "there is no such run", "not_found")
        return run

    def _runs(self, request: Request) -> list[Run]:
        """The runs that a request names; those that do not exist are omitted."""
        named = dict.fromkeys(request.query_params.getlist("run"))
        if len(named) > _MOST_RUNS:
            raise Refusal(400, f"{len(named)} runs are named, must be at most {_MOST_RUNS}", "bad_parameter")
        return [run for run_id in named if (run := self._all.run(run_id)) is not None]

    def _asked(self, request: Request) -> tuple[list[Run], lines.Query]:
        """The lines that a request names."""
        runs, metrics = self._runs(request), tuple(dict.fromkeys(request.query_params.getlist("metric")))
        if len(runs) * len(metrics) > _MOST_SERIES:
            raise Refusal(400, f"{len(runs) * len(metrics)} lines, must be at most {_MOST_SERIES}", "bad_parameter")
        return runs, lines.Query(
            metrics=metrics,
            axis=lines.Axis(_one_of(request, "x", [str(axis) for axis in lines.Axis])),
            low=_optional(request, "from"),
            high=_optional(request, "to"),
            points=int(_number(request, "points", 1_200, *_POINTS)),
            smooth=_number(request, "smooth", 0.0, 0.0, 0.9999),
        )


def _searched(runs: Sequence[Run], expression: str, within: str) -> list[Run]:
    try:
        search = Search(expression)
        texts: dict[str, Callable[[Run], str]] = {
            "name": lambda run: run.name,
            "config": lambda run: files.config_text(run) or "",
            "any": lambda run: f"{run.name}\n{files.config_text(run) or ''}",
        }
        if within not in texts:
            raise UserError("within must be name, config or any")
        return [run for run in runs if search.matches(texts[within](run))]
    except UserError as error:
        raise Refusal(400, str(error), "bad_search") from None


def _order(name: str) -> Callable[[dict[str, Json]], tuple[float, str]]:
    """Sorts rows by a column: names and losses from the lowest, times and steps from the highest."""
    sign = 1.0 if name in ("name", "loss") else -1.0

    def key(row: dict[str, Json]) -> tuple[float, str]:
        value = row[name]
        number = sign * value if isinstance(value, (int, float)) else math.inf
        return (0.0 if name == "name" else number, str(row["name"]))

    return key


async def _shown(runs: Sequence[Run]) -> None:
    """Waits a moment for runs that were found just now, so that the first answer has something to show."""
    end_s = time.monotonic() + MOMENT_S
    while any(run.is_new for run in runs) and time.monotonic() < end_s:
        await asyncio.sleep(0.02)


def _stamp(runs: Sequence[Run]) -> tuple[tuple[str, int, bool], ...]:
    return tuple((run.id, run.version, run.is_loading) for run in runs)


def _json(value: Json) -> Response:
    return Response(json_bytes(value), media_type="application/json")


def _optional(request: Request, name: str) -> float | None:
    text = request.query_params.get(name, "")
    return None if not text else _number(request, name, 0.0, -1e300, 1e300)


def _number(request: Request, name: str, default: float, low: float, high: float) -> float:
    """A parameter that is a number.

    Raises:
      Refusal: it is none, or out of its range.
    """
    text = request.query_params.get(name)
    if not text:
        return default
    try:
        value = float(text[:40])
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise Refusal(400, f"{name} is {text[:40]!r}, must be a number from {low:g} to {high:g}", "bad_parameter")
    return value


def _one_of(request: Request, name: str, choices: Sequence[str]) -> str:
    """A parameter that is one of several words; the first is the default."""
    value = request.query_params.get(name) or choices[0]
    if value not in choices:
        raise Refusal(400, f"{name} is {value[:40]!r}, must be one of {', '.join(choices)}", "bad_parameter")
    return value
