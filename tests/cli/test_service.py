"""`motley service`: what the system is told, and what it starts. Systemd is a real one where it can be; schtasks is
played."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from motley.cli.service import run
from motley.cli.service.manager import Manager
from motley.cli.service.systemd import unit
from motley.cli.service.windows_task import task
from tests.e2e.processes import motley

SYSTEMD = Path("/lib/systemd/systemd")
CAN_RUN = (
    sys.platform.startswith("linux")
    and SYSTEMD.exists()
    and os.geteuid() == 0
    and os.access("/sys/fs/cgroup", os.W_OK)
    and shutil.which("unshare") is not None
)
SPACE = "{http://schemas.microsoft.com/windows/2004/02/mit/task}"


def test_the_unit_of_systemd() -> None:
    lines = unit("/opt/my motley/100%/bin/python", '/srv/$mot"ley').splitlines()
    assert 'ExecStart="/opt/my motley/100%%/bin/python" -m motley.cli.service.run "/srv/$$mot\\"ley"' in lines
    assert {
        "Restart=on-failure",
        "KillMode=mixed",
        "SuccessExitStatus=130",
        "[Install]",
        "WantedBy=default.target",
    } <= set(lines)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    file = tmp_path / "motley.service"
    file.write_text(unit(sys.executable, "/srv/mot ley/100%"))
    command, where = (
        ("systemd-analyze", "verify", "--user", str(file)),
        {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
    )
    told = subprocess.run(command, env=where, capture_output=True, text=True, timeout=60, check=True)
    assert "motley.service" not in told.stdout + told.stderr, "what it does not understand, it ignores"


def test_the_task_of_windows() -> None:
    """It never ends by itself, not by the clock and not by the battery, and begins with the user's logon."""
    text = task(r"C:\Program Files\R&D\pythonw.exe", "DEN\\anna", r"D:\my models\motley")
    top = ElementTree.fromstring(text.replace(' encoding="UTF-16"', ""))
    told = {each.tag.removeprefix(SPACE): each.text for each in top.iter()}
    assert told["Command"] == r"C:\Program Files\R&D\pythonw.exe"
    assert told["Arguments"] == r'-m motley.cli.service.run "D:\my models\motley"'
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


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A manager of this user's services, as there is where systemd has started the machine; by what it is reached."""
    runtime = tempfile.mkdtemp()  # paths of sockets are short
    where = {
        "XDG_RUNTIME_DIR": runtime,
        "DBUS_SESSION_BUS_ADDRESS": f"unix:path={runtime}/bus",
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "HOME": str(tmp_path),
        "MOTLEY_HOME": str(tmp_path / "mot ley 100%"),
    }
    booted = f"mount -t tmpfs tmpfs /run && mkdir -p /run/systemd/system && exec {SYSTEMD} --user"
    manager = subprocess.Popen(
        ("unshare", "--mount", "--propagation", "private", "sh", "-c", booted), env={**os.environ, **where}
    )
    with manager:
        yield where
        manager.terminate()
    shutil.rmtree(runtime, ignore_errors=True)


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while True:
            if condition():
                return
            await asyncio.sleep(0.05)


@pytest.mark.skipif(not CAN_RUN, reason="systemd is started by root, on Linux where it is installed")
async def test_systemd_runs_it(tmp_path: Path, systemd: dict[str, str]) -> None:
    def shown() -> dict[str, str]:
        command = ("systemctl", "--user", "show", "--property", "MainPID,SubState,Result,LoadState", "motley")
        told = subprocess.run(command, env={**os.environ, **systemd}, capture_output=True, text=True, check=False)
        return dict(line.partition("=")[::2] for line in told.stdout.splitlines())

    def stands(**wanted: str) -> Callable[[], bool]:
        return lambda: wanted.items() <= shown().items()

    await _until(stands(LoadState="not-found"))
    alone = ("--no-node", "--host", "127.0.0.1", "--port", "0", "--http-port", "0", "--https-port", "-1")
    status, _, err = await motley("service", "install", "--up", "--", *alone, **systemd)
    assert status == 0, err
    await _until(stands(SubState="running"))
    await _until(lambda: (tmp_path / "mot ley 100%" / "meshes").exists())  # it is up
    main = shown()["MainPID"]
    _, out, _ = await motley("service", "status", **systemd)
    assert f"Main PID: {main}" in out
    os.kill(int(main), signal.SIGKILL)
    await _until(stands(SubState="auto-restart", Result="signal"))
    status, _, err = await motley("service", "install", "--up", "--", *alone, **systemd)  # once more, and at once
    assert status == 0, err
    await _until(stands(SubState="running", Result="success"))
    status, _, err = await motley("service", "uninstall", **systemd)
    assert status == 0, err
    assert stands(LoadState="not-found")()
    assert not list((tmp_path / "config").rglob("motley.service"))


async def test_what_the_system_starts(tmp_path: Path) -> None:
    async def run() -> tuple[int | None, str]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "motley.cli.service.run", str(tmp_path)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={"PATH": "/usr/bin:/bin"},
        )
        out, _ = await asyncio.wait_for(process.communicate(), 60)
        return process.returncode, out.decode()

    status, said = await run()
    assert (status, "run `motley service install` again" in said) == (1, True)
    (tmp_path / "service.json").write_text('{"arguments": ["--version"], "token": ""}')
    status, said = await run()
    assert (status, said.count(".")) == (0, 2)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="folders are called otherwise elsewhere")
def test_a_service_keeps_shares_where_others_on_this_machine_do(tmp_path: Path) -> None:
    own = tmp_path / "own"
    for home, shares in ((tmp_path / ".local/share/motley", tmp_path / ".cache/motley/shares"), (own, own / "shares")):
        home.mkdir(parents=True)
        (home / "service.json").write_text('{"arguments": ["cache", "ls", "--json"], "token": ""}')
        said = subprocess.run(
            (sys.executable, "-m", "motley.cli.service.run", str(home)),
            env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
            capture_output=True,
            timeout=60,
            check=True,
        ).stdout
        assert json.loads(said)["folder"] == str(shares)


@pytest.mark.parametrize("read", [False, True])
def test_the_log_of_windows_is_a_new_one_unless_somebody_has_the_old_one_open(
    read: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as `motley service logs`: the system refuses to rename it."""

    def refuse(log: Path, _: Path) -> None:
        raise PermissionError(13, "Access is denied", str(log))

    (tmp_path / "service.log").write_text("before\n")
    monkeypatch.setenv("MOTLEY_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["run", str(tmp_path)])
    monkeypatch.setattr(run.sys, "platform", "win32")
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(sys, stream, None)
    if read:
        monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(SystemExit, match="run `motley service install` again"):
        run.main()
    print("now", file=sys.stdout, flush=True)
    sys.stdout.close()
    monkeypatch.undo()
    assert (tmp_path / "service.log").read_text() == ("before\nnow\n" if read else "now\n")
    assert read or (tmp_path / "service.old.log").read_text() == "before\n"
