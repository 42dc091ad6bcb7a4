"""The part of the Hugging Face hub's HTTP API by which models are searched and fetched, of folders on this machine."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class LocalHub:
    """Serves repositories; use `serving`.

    Attributes:
        repositories: the folder of each, by ``owner/name``.
        about: what a search tells of each besides.
        fetched: the names of files that were fetched.
        sent: bytes that were sent of each.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Path] = {}
        self.about: dict[str, dict[str, Any]] = {}
        self.fetched: list[str] = []
        self.sent: Counter[str] = Counter()
        self.url = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        app = web.Application()
        app.add_routes(
            [
                web.get("/api/models", self._search),
                web.get("/api/models/{owner}/{name}/revision/{revision}", self._info),
                web.get("/api/models/{owner}/{name}/tree/{revision}", self._tree),
                web.get("/{owner}/{name}/resolve/{revision}/{file:.+}", self._file),
            ]
        )
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = runner.addresses[0] and f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield
        finally:
            await runner.cleanup()

    def _folder(self, request: web.Request) -> Path:
        repository = f"{request.match_info['owner']}/{request.match_info['name']}"
        if repository not in self.repositories:
            headers = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
            raise web.HTTPNotFound(headers=headers, text="{}")
        return self.repositories[repository]

    async def _search(self, request: web.Request) -> web.Response:
        word = request.query.get("search", "").lower()
        found = [{"id": name, **about} for name, about in self.about.items() if word in name.lower()]
        return web.json_response(found)

    async def _info(self, request: web.Request) -> web.Response:
        folder = self._folder(request)
        files = [{"rfilename": name} for name in _files(folder)]
        return web.json_response({"id": "any", "sha": COMMIT, "siblings": files})

    async def _tree(self, request: web.Request) -> web.Response:
        folder = self._folder(request)
        files = [
            {"type": "file", "path": name, "size": file.stat().st_size, "oid": _digest(file)}
            for name, file in _files(folder).items()
        ]
        return web.json_response(files)

    async def _file(self, request: web.Request) -> web.StreamResponse:
        file = self._folder(request) / request.match_info["file"]
        if not file.is_file():
            raise web.HTTPNotFound(headers={"X-Error-Code": "EntryNotFound"}, text=json.dumps({}))
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{_digest(file)}"', "Accept-Ranges": "bytes"}
        data, status, asked = file.read_bytes(), 200, request.http_range
        if asked.start is not None:
            status, headers["Content-Range"] = 206, f"bytes {asked.start}-{asked.stop - 1}/{len(data)}"
            data = data[asked]
        if request.method != "HEAD":
            self.fetched.append(file.name)
            self.sent[file.name] += len(data)
        return web.Response(body=data, status=status, headers=headers)


def _files(folder: Path) -> dict[str, Path]:
    """The files of a repository, by their names there."""
    return {file.relative_to(folder).as_posix(): file for file in sorted(folder.rglob("*")) if file.is_file()}


def _digest(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()
