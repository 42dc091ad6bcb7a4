"""`motley jobs`: trainings that run on machines of the mesh, or did."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any
from urllib.parse import quote

import typer

from motley.cli.interrupt import run
from motley.cli.reaching.client import ApiKey, Client, Url
from motley.cli.shown.show import results, table
from motley.cli.training_job import described, follow_job
from motley.cli.typed.command_group import CommandGroup
from motley.cli.typed.options import AsJson

Which = Annotated[str, typer.Argument(metavar="JOB", help="Its id or name, as `motley jobs ls` shows it.")]

jobs = CommandGroup("Trainings on machines of the mesh (`motley train --mode`).")


def register(app: typer.Typer) -> None:
    app.add_typer(jobs, name="jobs")


@jobs.callback()
def _jobs() -> None:
    """Trainings on machines of the mesh (`motley train --mode`)."""


@jobs.command(name="ls")
def list_them(url: Url = "", api_key: ApiKey = "", as_json: AsJson = False) -> None:
    """List all jobs, the oldest first."""
    told = run(_call("GET", "/api/jobs", url, api_key))
    if as_json:
        print(json.dumps(told))
        return
    rows = [
        [
            job["id"],
            job["name"],
            job["mode"],
            job["model"],
            ", ".join(member["node"] for member in job["members"] if not member["leads"]),
            job["state"],
            time.strftime("%m-%d %H:%M", time.localtime(job["created"])),
        ]
        for job in told["jobs"]
    ]
    results.print(table(["id", "name", "mode", "model", "nodes", "state", "begun"], rows))


@jobs.command(epilog="Example: motley jobs show letters")
def show(job: Which, url: Url = "", api_key: ApiKey = "", as_json: AsJson = False) -> None:
    """Show a job: its nodes with their losses, speed and memory, and what came of it."""
    _tell(run(_call("GET", _path(job), url, api_key)), as_json)


@jobs.command(epilog="Example: motley jobs logs letters --follow")
def logs(
    job: Which,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job is over.")] = False,
    url: Url = "",
    api_key: ApiKey = "",
) -> None:
    """Print what a job has told."""

    async def followed() -> dict[str, Any]:
        async with Client(url, api_key) as client:
            return await follow_job(client, quote(job, safe=""))

    if follow:
        run(followed())
        return
    for line in run(_call("GET", _path(job), url, api_key))["log"]:
        print(line)


@jobs.command()
def stop(job: Which, url: Url = "", api_key: ApiKey = "", as_json: AsJson = False) -> None:
    """End a job. Nodes remove what they have of it, and get their devices back."""
    _tell(run(_call("DELETE", _path(job), url, api_key)), as_json)


def _path(job: str) -> str:
    return f"/api/jobs/{quote(job, safe='')}"


async def _call(method: str, path: str, url: str, api_key: str) -> dict[str, Any]:
    async with Client(url, api_key) as client:
        return await client.call(method, path)


def _tell(job: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(job))
        return
    for line in described(job):
        results.print(line, soft_wrap=True, markup=False)
