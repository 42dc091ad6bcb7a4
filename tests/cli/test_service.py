"""`motley service`: what the system is told, and what it starts. Systemd and schtasks themselves are played here."""

from __future__ import annotations

import asyncio
import json
import stat
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from motley.cli.service.manager import Manager
from motley.cli.service.systemd import unit
from motley.cli.service.windows_task import task
from tests.e2e.processes import motley

SPACE = "{http://schemas.microsoft.com/windows/2004/02/mit/task}"


def test_the_unit_of_systemd() -> None:
    lines = unit("/opt/my motley/100%/bin/python", '/srv/mot"ley').splitlines()
    assert 'ExecStart="/opt/my motley/100%%/bin/python" -m motley.cli.service.run' in lines
    assert 'Environment="MOTLEY_HOME=/srv/mot\\"ley"' in lines
    assert {
        "Restart=on-failure",
        "KillMode=mixed",
        "SuccessExitStatus=130",
        "[Install]",
        "WantedBy=default.target",
    } <= set(lines)
    assert "MOTLEY_HOME" not in unit("/usr/bin/python3")


def test_the_task_of_windows() -> None:
    """It never ends by itself, not by the clock and not by the battery, and begins with the user's logon."""
    text = task(r"C:\Program Files\R&D\pythonw.exe", "DEN\\anna")
    top = ElementTree.fromstring(text.replace(' encoding="UTF-16"', ""))
    told = {each.tag.removeprefix(SPACE): each.text for each in top.iter()}
    assert told["Command"] == r"C:\Program Files\R&D\pythonw.exe"
    assert told["Arguments"] == "-m motley.cli.service.run"
    assert (told["ExecutionTimeLimit"], told["DisallowStartIfOnBatteries"]) == ("PT0S", "false")
    assert [each.text for each in top.iter(f"{SPACE}UserId")] == ["DEN\\anna"] * 2
    assert top.find(f"{SPACE}Triggers/{SPACE}LogonTrigger") is not None


def test_what_the_system_does_not_know_is_not_ended(tmp_path: Path) -> None:
    """As with a task of Windows: what runs is ended before it is begun anew, and one removed by hand is forgotten."""
    known, told = tmp_path / "known", tmp_path / "told"

    def does(python: str) -> list[str]:
        return [
            sys.executable,
            "-c",
            f"from pathlib import Path; known, told = map(Path, {[*map(str, (known, told))]}); {python}",
        ]

    def notes(word: str) -> list[str]:
        return does(f"told.open('a').write('{word} ')")

    manager = Manager(
        tmp_path / "file",
        b"",
        known=does("known.stat()"),
        end=[notes("end")],
        start=[notes("start"), does("known.touch()")],
        stop=[notes("stop")],
        stopped=(),
        state=(),
        logs=None,
        hint="",
    )
    manager.install()
    manager.install()
    manager.uninstall()
    assert told.read_text() == "start end start end stop "
    manager.install()
    known.unlink()
    manager.uninstall()
    assert told.read_text() == "start end start end stop end start "
    assert not manager.file.exists()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it is the service of Linux")
async def test_install_and_uninstall(tmp_path: Path) -> None:
    """With a systemctl that notes what it is told, and refuses where a file says so."""
    (tmp_path / "bin").mkdir()
    played = tmp_path / "bin" / "systemctl"
    refusal = f"[ ! -e {tmp_path}/broken ] || {{ echo no bus >&2; exit 1; }}"
    played.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/told\n{refusal}\n')
    played.chmod(0o755)
    where = {
        "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin",
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "MOTLEY_HOME": str(tmp_path / "home"),
    }
    join = ("--join", "192.168.1.10:7337/wq0m.ab12")
    status, out, err = await motley("service", "install", *join, "--", "--memory", "6GB", **where)
    assert (status, "runs as a service now" in out) == (0, True), err
    assert "loginctl enable-linger" in err
    file = tmp_path / "config" / "systemd" / "user" / "motley.service"
    assert "wq0m" not in file.read_text(), "tokens are in no file that others read"
    settings = tmp_path / "home" / "service.json"
    assert stat.S_IMODE(settings.stat().st_mode) == 0o600
    arguments = ["join", "192.168.1.10:7337", "--memory", "6GB"]
    assert json.loads(settings.read_text()) == {"arguments": arguments, "token": "wq0m.ab12"}
    assert (tmp_path / "told").read_text().splitlines() == [
        "--user daemon-reload",
        "--user enable motley.service",
        "--user restart motley.service",
    ]
    status, _, err = await motley("service", "uninstall", **where)
    assert (status, file.exists(), settings.exists()) == (0, False, False), err
    status, _, err = await motley("service", "uninstall", **where)
    assert (status, "there is no service" in err) == (1, True)
    (tmp_path / "broken").touch()
    status, _, err = await motley("service", "install", "--up", **where)
    assert (status, err) == (1, "motley: `systemctl --user daemon-reload` failed: no bus\n")
    for wrong in ((), ("--up", *join)):
        status, _, err = await motley("service", "install", *wrong, **where)
        assert (status, "say either --up" in err) == (1, True)


async def test_what_the_system_starts(tmp_path: Path) -> None:
    async def run() -> tuple[int | None, str]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "motley.cli.service.run"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={"MOTLEY_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        )
        out, _ = await asyncio.wait_for(process.communicate(), 60)
        return process.returncode, out.decode()

    status, said = await run()
    assert (status, "run `motley service install` again" in said) == (1, True)
    (tmp_path / "service.json").write_text('{"arguments": ["--version"], "token": ""}')
    status, said = await run()
    assert (status, said.count(".")) == (0, 2)
