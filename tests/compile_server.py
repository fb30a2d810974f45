"""Runs scripts that compile kernels, each in a fork of one process that has imported torch, Triton and the library.

As a script it reads one JSON list per line, ``[folder, script, *arguments]``, runs the script in the folder, and prints
its exit status; what the script prints goes to the files ``stdout`` and ``stderr`` there.
"""

import atexit
import functools
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import traceback
import warnings
from pathlib import Path

TESTS = Path(__file__).resolve().parent
SECONDS = 1800
# Triton 3.7 builds syntax trees in a way that Python 3.13 has deprecated.
OF_TRITON = "ignore:AnnAssign.__init__ missing 1 required positional argument:DeprecationWarning"


def run(folder: Path, script: str, *arguments: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a script, from a server of this process; warnings are errors."""
    server = _server()
    assert server.stdin is not None
    print(json.dumps([str(folder), script, *arguments]), file=server.stdin, flush=True)
    status = int(server.stdout.readline() or -1)
    return status, *((folder / stream).read_text() for stream in ("stdout", "stderr"))


@functools.cache
def _server() -> "subprocess.Popen[str]":
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "error", "-W", OF_TRITON, __file__]
    server = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(_stop, server)
    return server


def _stop(server: "subprocess.Popen[str]") -> None:
    server.kill()
    server.communicate()


def _run_in_a_fork(folder: str, script: str, *arguments: str) -> int:
    with warnings.catch_warnings():
        # The threads of NumPy's BLAS, which forks well.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        signal.alarm(SECONDS)
        # Syntax trees by the thousand, and nothing that must be gone before the end.
        gc.disable()
        os.chdir(folder)
        os.environ["TRITON_CACHE_DIR"] = os.path.join(folder, "cache")
        for stream, descriptor in (("stdout", 1), ("stderr", 2)):
            os.dup2(os.open(stream, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
        sys.argv = [script, *arguments]
        runpy.run_path(script, run_name="__main__")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    import code_generation  # noqa: F401  with it what every script needs

    for line in sys.stdin:
        print(_run_in_a_fork(*json.loads(line)), flush=True)
