"""The dispatcher: every command exists, is imported only when asked for, and a wrong one is named."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from rhymemeg import __version__, commands


def test_every_command_has_its_function() -> None:
    for name, command in commands.COMMANDS.items():
        spec = importlib.util.find_spec(command.module)
        assert spec is not None and spec.origin is not None, name
        with open(spec.origin, encoding="utf-8") as file:
            assert f"\ndef {command.function}(argv" in file.read(), name


def test_help_lists_all_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from rhymemeg import commands; commands.main(['--help']);"
        "assert not {'torch', 'vllm', 'megatron', 'numpy', 'rhymemeg.train'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in commands.COMMANDS)


def test_wrong_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["trian"]) == 2
    assert "unknown command 'trian', did you mean train?" in capsys.readouterr().err
    assert commands.main([]) == 2


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


def test_arguments_reach_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    import rhymemeg.train

    def train(argv: list[str]) -> int:
        seen.append(argv)
        return 3

    monkeypatch.setattr(rhymemeg.train, "main", train)
    assert commands.main(["train", "--dry-run"]) == 3
    assert seen == [["--dry-run"]]
