"""Scripts in new processes, forked from servers that have imported torch and more, which takes seconds.

The first pytest process starts one server, and xdist's workers share it. It imports nothing until a
script asks; then each stage is a fork of the one before it.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = "DYNORM_TESTS_SERVER"
# What each stage has imported, beside all before it.
STAGES = {
    "torch": ["torch"],
    "libraries": [
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torchao",
        "scipy.optimize",
        "sklearn.metrics",
        "accelerate",
    ],
    "transformers": ["transformers.trainer", "transformers.modeling_utils"],
    "dynorm": ["dynorm.hub.transformers", "tests.parallel.launch", "tests.parallel.cases"],
}


class Script:
    """A script that runs in a process of its own."""

    def __init__(
        self,
        script: str,
        *arguments: object,
        imported: str = "dynorm",
        folder: Path = ROOT,
        environment: Mapping[str, str] | None = None,
        seconds: int = 120,
    ) -> None:
        servers = os.environ[FOLDER]
        self.log = Path(tempfile.mkdtemp(dir=servers))
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.connect(f"{servers}/{imported}")
        request = {
            "script": script,
            "arguments": [str(argument) for argument in arguments],
            "folder": str(folder),
            "environment": {**(environment or {})},
            "log": str(self.log),
            "seconds": seconds,
        }
        self.connection.sendall(json.dumps(request).encode() + b"\n")

    def result(self) -> str:
        """Return what it printed. If it failed, so does the test."""
        with self.connection, self.connection.makefile() as answer:
            status = answer.read() or "none: it died, took too long, or found no server"
        assert status == "0", f"status {status}\n{self.complaints()}"
        return (self.log / "stdout").read_text("utf-8")

    def complaints(self) -> str:
        """Return what it wrote to its standard error, or its server if it never began."""
        own = self.log / "stderr"
        place = own if own.exists() else self.log.with_name("stderr")
        return place.read_text("utf-8")


def run(script: str, *arguments: object, **options: Any) -> str:
    """Return the output of a script in a process of its own."""
    return Script(script, *arguments, **options).result()


def start() -> Callable[[], None]:
    """Start the server, unless there is one; return how it is stopped."""
    if FOLDER in os.environ:
        return lambda: None
    folder = tempfile.TemporaryDirectory()
    listeners = []
    for stage in STAGES:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"{folder.name}/{stage}")
        listener.listen()
        listeners.append(listener)
    numbers = [listener.fileno() for listener in listeners]
    command = [sys.executable, "-m", "tests.fresh", *map(str, numbers)]
    with Path(folder.name, "stderr").open("w") as errors:
        server = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stderr=errors, pass_fds=numbers
        )
    os.environ[FOLDER] = folder.name

    def stop() -> None:
        del os.environ[FOLDER]
        server.communicate()
        for listener in listeners:
            listener.close()
        folder.cleanup()

    return stop


def _serve(listeners: list[socket.socket]) -> None:
    """Import one stage after another, each in a fork of the one before it, and run the scripts of each."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for names in STAGES.values():
        _wait(listeners)
        for name in names:
            importlib.import_module(name)
        _answer(listeners)
        listeners = listeners[1:]


def _answer(listeners: list[socket.socket]) -> None:
    """Run the scripts of the first listener; return in a fork, as soon as a script needs a later stage."""
    first = listeners[0]
    while True:
        if first in _wait(listeners):
            connection, _ = first.accept()
            if not os.fork():
                _run(connection)
            connection.close()
        elif os.fork():
            listeners = [first]
        else:
            return


def _wait(listeners: list[socket.socket]) -> list[Any]:
    """Return the listeners that are asked; end with the pytest that started the server."""
    ready, _, _ = select.select([0, *listeners], [], [])
    if 0 in ready:
        os._exit(0)
    return ready


def _run(connection: socket.socket) -> None:
    """Do what a request says, as ``python -c`` does, answer with the status, and end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request = json.loads(connection.makefile().readline())
    signal.alarm(request["seconds"])
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{request['log']}/{name}", os.O_WRONLY | os.O_CREAT), number)
    os.chdir(request["folder"])
    os.environ.update(request["environment"])
    sys.path.insert(0, request["folder"])
    sys.argv = ["-c", *request["arguments"]]
    module = sys.modules["__main__"] = ModuleType("__main__")
    status: object = 0
    try:
        exec(request["script"], vars(module))
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    connection.sendall(str(status).encode())
    os._exit(0)


if __name__ == "__main__":
    _serve([socket.socket(fileno=int(number)) for number in sys.argv[1:]])
