"""The engines that are installed on this machine, what they are, and whether they can run here.

Asking means importing them, and libraries of a gigabyte with them: a process of its own does it, which may also crash.
"""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import asdict

from motley.daemon.machine.ending import end_process, end_with_owner
from motley.daemon.machine.gpus import gpus
from motley.daemon.node.child import kill_child, start_child
from motley.plugins.engine import EngineError
from motley.plugins.installed import abilities, device_speed, engine_names, lacking, on_gpu
from motley.protocol import mesh_pb2 as pb

ASK_S = 120.0
"""Engines have so many seconds to be asked, all together; a library that is not loaded then hangs."""


async def installed_engines() -> list[pb.Engine]:
    """Ask every installed engine what it is; of one that could not be asked, `lacking` says so."""
    process = await start_child("motley.daemon.node.survey.engines", stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    out = b""
    try:
        async with asyncio.timeout(ASK_S):
            while line := await process.stdout.readline():
                out += line
        why = f"asking it what it needs ended with status {await process.wait()}"
    except TimeoutError:
        why = f"it did not say within {ASK_S:.0f} s what it needs"
    finally:
        await kill_child(process)
    said = {told["name"]: told for told in map(json.loads, out.decode().splitlines())}
    return [pb.Engine(**said.get(name, {"name": name, "lacking": why})) for name in engine_names()]


def _ask(name: str) -> dict[str, object]:
    """The fields of an engine's `mesh_pb2.Engine`."""
    try:
        told = abilities(name)._asdict()
        del told["takes_adapters"]  # ranks find that out
        kind = {**told, "on_gpu": on_gpu(name)}
        in_the_way = lacking(name)
        measures = kind["on_gpu"] and not in_the_way and gpus()  # what no node offers is not measured
        speed = asdict(device_speed(name)) if measures else {}
        return {"name": name, "lacking": in_the_way, **kind, **speed}
    except EngineError as error:
        return {"name": name, "lacking": str(error)}
    except Exception as error:  # somebody else's code
        return {"name": name, "lacking": f"{type(error).__name__}: {error}"}


def main() -> None:
    """A line of JSON for every engine, as it has been asked; what libraries print meanwhile goes to stderr."""
    end_with_owner()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        for name in engine_names():
            print(json.dumps(_ask(name)), file=out, flush=True)


if __name__ == "__main__":
    main()
    end_process()
