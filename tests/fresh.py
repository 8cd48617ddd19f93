"""Fresh processes: forks of one that has imported torch and nothing else, which takes a second of each that does."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn


def run(
    *arguments: str, env: Mapping[str, str] | None = None, cwd: Path | None = None, check: bool = False
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run([sys.executable, *arguments], capture_output=True, text=True)`."""
    (done,) = run_together(arguments, env=env, cwd=cwd)
    if check:
        assert done.returncode == 0, done.stderr[-4000:]
    return done


def run_together(
    *commands: tuple[str, ...], env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> list[subprocess.CompletedProcess[str]]:
    """Runs commands at the same time."""
    with tempfile.TemporaryDirectory() as folder:
        tasks = [
            {
                "arguments": list(command),
                "environment": dict(os.environ if env is None else env),
                "folder": str(cwd or Path.cwd()),
                "output": [f"{folder}/{number}.out", f"{folder}/{number}.err"],
            }
            for number, command in enumerate(commands)
        ]
        server = _server()
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(tasks) + "\n")
        server.stdin.flush()
        codes = json.loads(server.stdout.readline())
        return [
            subprocess.CompletedProcess(command, code, *(Path(file).read_text() for file in task["output"]))
            for command, code, task in zip(commands, codes, tasks, strict=True)
        ]


@functools.cache
def _server() -> subprocess.Popen[str]:
    command = [sys.executable, __file__]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def stop() -> None:
        assert server.stdin is not None
        server.stdin.close()
        server.wait()

    atexit.register(stop)
    return server


def _serve() -> None:
    import torch  # noqa: F401

    sys.path.pop(0)  # this folder
    for line in sys.stdin:
        children = [_fork(task) for task in json.loads(line)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps(codes), flush=True)


def _fork(task: dict[str, Any]) -> int:
    child = os.fork()
    if child == 0:
        _become(**task)
    return child


def _become(arguments: list[str], environment: dict[str, str], folder: str, output: list[str]) -> NoReturn:
    for stream, file in zip((1, 2), output, strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    code = 1
    try:
        _run(arguments, [place for place in environment.get("PYTHONPATH", "").split(os.pathsep) if place])
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001  (what Python does with it)
        traceback.print_exc()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _run(arguments: list[str], places: list[str]) -> None:
    first, *rest = arguments
    if first == "-c":
        sys.path[:0] = ["", *places]
        sys.argv = ["-c", *rest[1:]]
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    elif first == "-m":
        sys.path[:0] = [str(Path.cwd()), *places]
        sys.argv = ["-m", *rest[1:]]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[:0] = [str(Path(first).resolve().parent), *places]
        sys.argv = arguments
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    _serve()
