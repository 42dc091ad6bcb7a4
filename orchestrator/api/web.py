"""The page a person looks at: a few static files. They hold no secret; all they show comes through the API."""

from __future__ import annotations

from importlib.resources import files

from aiohttp import web
from aiohttp.typedefs import Handler

_SCRIPTS = (
    *("access", "adapters", "app", "chat", "common", "create", "dialogs", "experts", "fit"),
    *("jobs", "markdown", "mesh", "options", "sessions", "steps", "whatif"),
)
_FILES = {
    "/": ("index.html", "text/html"),
    "/web/app.css": ("app.css", "text/css"),
    "/web/icon.svg": ("icon.svg", "image/svg+xml"),
    **{f"/web/{name}.js": (f"{name}.js", "text/javascript") for name in _SCRIPTS},
}
PAGE_PATHS = frozenset(_FILES)
"""What a browser may have without an API key: it cannot send one before the page asks for it."""

_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_routes() -> list[web.RouteDef]:
    folder = files("motley.orchestrator") / "web"
    return [
        web.get(path, _serve((folder / name).read_bytes(), content_type))
        for path, (name, content_type) in _FILES.items()
    ]


def _serve(body: bytes, content_type: str) -> Handler:
    async def serve(_: web.Request) -> web.Response:
        return web.Response(body=body, content_type=content_type, charset="utf-8", headers=_HEADERS)

    return serve
