"""Code that a model wrote: what counts as right, and what a program cannot do."""

from __future__ import annotations

import socket
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest

from rhymemeg.rl.rewards.code import code_tests
from rhymemeg.rl.rewards.sandbox import Limits, Outcome, SandboxError, run

try:
    run("pass", limits=Limits(wall_seconds=30))
    REASON = ""
except SandboxError as error:
    REASON = str(error)
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)

ADD = "Here it is:\n```python\na, b = map(int, input().split())\nprint(a + b)\n```\nDone."
TESTS = [{"input": "1 2", "output": "3\n"}, {"input": "-4 4", "output": "0"}]


def test_programs_are_judged_by_their_output() -> None:
    assert code_tests(ADD, TESTS) == {"score": 1.0, "passed": 1.0, "slow": 0.0, "found": 1.0}
    wrong = [*TESTS, {"input": "1 1", "output": "3"}]
    assert code_tests(ADD, wrong)["score"] == 0.0
    assert code_tests(ADD, wrong, all_or_nothing=False)["score"] == pytest.approx(2 / 3)
    assert code_tests("a = 1", TESTS) == {"score": 0.0, "passed": 0.0, "slow": 0.0, "found": 0.0}


def test_programs_are_judged_by_statements_that_follow() -> None:
    response = "```python\ndef double(x):\n    return 2 * x\n```"
    assert code_tests(response, [{"code": "assert double(3) == 6"}])["score"] == 1.0
    assert code_tests(response, [{"code": "assert double(3) == 7"}])["score"] == 0.0
    early = "```python\nimport os\nos._exit(0)\n```"
    assert code_tests(early, [{"code": "assert False"}])["score"] == 0.0


def test_a_slow_program_is_stopped() -> None:
    began = time.monotonic()
    result = code_tests("```python\nwhile True:\n    pass\n```", TESTS, seconds=1.0)
    assert result["score"] == 0.0 and result["slow"] == 0.5 and time.monotonic() - began < 30


@pytest.mark.parametrize("label", ["x", [], [{"input": "1"}], [3]])
def test_a_label_of_another_kind_is_an_error(label: object) -> None:
    with pytest.raises(ValueError, match="code_tests"):
        code_tests(ADD, label)


def refused(program: str, error: str) -> None:
    outcome = run(program, limits=Limits(wall_seconds=20, cpu_seconds=10))
    assert outcome.status != 0 and error in outcome.errors.decode(), outcome


def test_no_network() -> None:
    """A server of this very machine cannot be reached."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        threading.Thread(target=lambda: server.accept(), daemon=True).start()
        refused(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 5)", "Error")
        socket.create_connection(("127.0.0.1", port), 5).close()


def test_limited_memory_and_files(tmp_path: Path) -> None:
    refused("x = bytearray(4 << 30)", "MemoryError")
    refused("open('big', 'wb').write(bytes(64 << 20))", "OSError")
    refused("for i in range(64):\n    open(f'{i}', 'wb').write(bytes(1 << 20))", "No space left")
    refused("files = [open('main.py') for _ in range(1000)]", "Too many open files")


def test_no_files_of_this_machine(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("key")
    outcome = run(f"print(open({str(secret)!r}).read())", limits=Limits(wall_seconds=20))
    if outcome.status == 0:
        pytest.skip("this kernel has no Landlock")
    refused(f"open({str(tmp_path / 'new')!r}, 'w')", "Permission denied")
    assert not (tmp_path / "new").exists()


def test_nothing_outlives_the_program() -> None:
    """A child that left its session and closed everything ends with the program."""
    name = uuid.uuid4().hex
    program = f"""
import os, sys
if os.fork() == 0:
    os.setsid()
    for fd in (0, 1, 2):
        os.close(fd)
    os.execv(sys.executable, [sys.executable, "-I", "-c", "import time; time.sleep(600)  # {name}"])
print("done")
"""
    began = time.monotonic()
    outcome = run(program, limits=Limits(wall_seconds=20))
    assert outcome.output == b"done\n" and time.monotonic() - began < 15
    assert not any(name.encode() in read(file) for file in Path("/proc").glob("[0-9]*/cmdline"))


def read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""


def test_output_is_limited_and_input_need_not_be_read() -> None:
    outcome = run("print('x' * 10**7)", limits=Limits(wall_seconds=20, output_bytes=1000))
    assert outcome.status == -1 and outcome.output == b"x" * 1000
    assert run("print(1)", b"y" * 10**6, Limits(wall_seconds=20)) == Outcome(0, b"1\n", b"", False)


def test_importing_the_jail_needs_no_package() -> None:
    """It starts without site-packages."""
    source = (Path(__file__).parents[3] / "rhymemeg/rl/rewards/jail.py").read_text()
    names = {line.split()[1].split(".")[0] for line in source.splitlines() if line.startswith(("import ", "from "))}
    assert names <= set(sys.stdlib_module_names) | {"__future__"}
