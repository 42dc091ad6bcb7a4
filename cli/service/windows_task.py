"""The service on Windows: a scheduled task that begins when this user logs on.

A service of Windows' own would run without the user's session, in which GPUs' drivers and the user's cache are.
"""

from __future__ import annotations

import getpass
import os
import subprocess
from pathlib import Path
from xml.sax.saxutils import escape

from motley.cli.reaching.home import home
from motley.cli.service.manager import Manager

NAME = "Motley"


def task(python: str, user: str, motley_home: str) -> str:
    """The text of the task, in the form that ``schtasks /xml`` takes.

    Args:
        python: the interpreter that Motley is installed in, which opens no window (``pythonw.exe``).
        user: whose logon it is, ``DOMAIN\\name``.
        motley_home: the folder in which Motley keeps what it needs another time.
    """
    arguments = subprocess.list2cmdline(["-m", "motley.cli.service.run", motley_home])
    return f"""\
<?xml version="1.0" encoding="UTF-16"?>
<Task version="1.2" xmlns="http://schemas.microsoft.com/windows/2004/02/mit/task">
  <RegistrationInfo>
    <Description>Motley: this machine's part of one language model</Description>
  </RegistrationInfo>
  <Triggers>
    <LogonTrigger>
      <Enabled>true</Enabled>
      <UserId>{escape(user)}</UserId>
    </LogonTrigger>
  </Triggers>
  <Principals>
    <Principal id="Author">
      <UserId>{escape(user)}</UserId>
      <LogonType>InteractiveToken</LogonType>
      <RunLevel>LeastPrivilege</RunLevel>
    </Principal>
  </Principals>
  <Settings>
    <MultipleInstancesPolicy>IgnoreNew</MultipleInstancesPolicy>
    <DisallowStartIfOnBatteries>false</DisallowStartIfOnBatteries>
    <StopIfGoingOnBatteries>false</StopIfGoingOnBatteries>
    <StartWhenAvailable>true</StartWhenAvailable>
    <Enabled>true</Enabled>
    <ExecutionTimeLimit>PT0S</ExecutionTimeLimit>
    <RestartOnFailure>
      <Interval>PT1M</Interval>
      <Count>999</Count>
    </RestartOnFailure>
  </Settings>
  <Actions Context="Author">
    <Exec>
      <Command>{escape(python)}</Command>
      <Arguments>{escape(arguments)}</Arguments>
    </Exec>
  </Actions>
</Task>
"""


def manager(python: str) -> Manager:
    """How Windows runs the service of this user."""
    windowless = Path(python).with_name("pythonw.exe")
    user = f"{os.environ.get('USERDOMAIN', '.')}\\{getpass.getuser()}"
    file = home() / "service.xml"
    return Manager(
        file,
        task(str(windowless), user, str(home().absolute())).encode("utf-16"),
        known=("schtasks", "/query", "/tn", NAME),
        end=(("schtasks", "/end", "/tn", NAME),),
        start=(
            ("schtasks", "/create", "/tn", NAME, "/xml", str(file), "/f"),
            ("schtasks", "/run", "/tn", NAME),
        ),
        stop=(("schtasks", "/delete", "/tn", NAME, "/f"),),
        stopped=(),
        state=("schtasks", "/query", "/tn", NAME, "/v", "/fo", "list"),
        logs=None,
        hint="It begins when you log on, and ends when you log off.",
    )
