"""Judging samples: what comes out, and how every failure is told. In this process and in worker processes alike."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rhymemeg.config import DataOptions
from rhymemeg.errors import RewardError
from rhymemeg.rl.rewards import Scorer, component_sums, known_rewards, register, resolve
from rhymemeg.rollout.samples import Prompt, Sample, SampleId

USER = "tests.rl.rewards.user_rewards"


def prompt(prompt_id: int = 7, label: Any = "1", text: str = "What?") -> Prompt:
    return Prompt(prompt_id, text, (1, 2), label, "task:test")


def sample(text: str, prompt_id: int = 7, index: int = 0) -> Sample:
    return Sample(SampleId(3, prompt_id, index), (1, 2), [3], [-0.1], [0], "stop", text=text)


@pytest.fixture(params=[0, 1], ids=["here", "worker"])
def workers(request: pytest.FixtureRequest) -> int:
    count: int = request.param
    return count


def judged(reward: str, *texts: str, workers: int = 0, timeout: float = 30.0, **arguments: Any) -> list[Sample]:
    samples = [sample(text, index=i) for i, text in enumerate(texts)]
    with Scorer(reward, timeout=timeout, workers=workers, arguments=arguments) as scorer:
        scorer.score(samples, [prompt()])
    return samples


# ------------------------------------------------------------------------------------------------------- what comes out


def test_scores_and_components(workers: int) -> None:
    assert [s.reward for s in judged(f"{USER}:length", "a" * 50, "", workers=workers)] == [0.5, 0.0]
    (detailed,) = judged(f"{USER}:detailed", "x", workers=workers, weight=2.0)
    assert (detailed.reward, detailed.reward_components) == (10.0, {"short": 1.0})


@pytest.mark.parametrize(("name", "reward"), [("everything", 1.0), ("numpy_number", 0.5), ("numpy_bool", 1.0)])
def test_what_functions_may_take_and_return(name: str, reward: float) -> None:
    assert judged(f"{USER}:{name}", "x")[0].reward == reward


def test_component_sums() -> None:
    samples = judged("ledger_like", "a", "b")
    assert component_sums(samples) == {"reward/part": (1.0, 2)}


@register("ledger_like")
def ledger_like(response: str, label: Any) -> dict[str, float]:
    return {"score": 1.0, "part": float(response == "a")}


def test_many_samples_over_several_workers() -> None:
    prompts = {i: prompt(i) for i in range(40)}
    samples = [sample("x" * i, prompt_id=i) for i in range(40)]
    with Scorer(f"{USER}:length", workers=2) as scorer:
        for _ in range(2):
            for one in samples:
                one.reward = None
            scorer.score(samples, prompts)
            assert [s.reward for s in samples] == [i / 100 for i in range(40)]
        scorer.score([], prompts)


def test_workers_are_light_processes_of_their_own_and_stay() -> None:
    with Scorer(f"{USER}:process", workers=1) as scorer:
        samples = [sample("x"), sample("y", index=1)]
        scorer.score(samples, [prompt()])
        scorer.score([again := sample("z")], [prompt()])
        assert len({samples[0].reward, samples[1].reward, again.reward}) == 1
        assert samples[0].reward != os.getpid()
    assert judged(f"{USER}:heavy_modules", "x", workers=1)[0].reward == 0.0


def test_what_a_reward_prints_does_no_harm(workers: int) -> None:
    assert [s.reward for s in judged(f"{USER}:prints", "x", "y", workers=workers)] == [1.0, 1.0]


# ----------------------------------------------------------------------------------------------------- while others run


def test_samples_are_judged_while_others_are_generated(workers: int) -> None:
    """Rewards appear between submissions, without anybody waiting for them."""
    samples = [sample("x" * i, index=i) for i in range(6)]
    with Scorer(f"{USER}:length", workers=workers) as scorer:
        for one in samples[:4]:
            scorer.submit(one, prompt())
        deadline = time.monotonic() + 60
        while any(one.reward is None for one in samples[:4]):
            scorer.poll()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert samples[4].reward is None
        scorer.submit(samples[4], prompt())
        scorer.score(samples, [prompt()])  # takes what was submitted, and judges the rest
        assert [one.reward for one in samples] == [i / 100 for i in range(6)]
        scorer.collect()


def test_a_sample_that_has_a_reward_is_not_judged_again(workers: int) -> None:
    done = sample("x")
    done.reward = 0.75
    with Scorer(f"{USER}:raises", workers=workers) as scorer:
        scorer.score([done], [prompt()])
    assert done.reward == 0.75


def test_a_problem_is_told_by_the_next_poll(workers: int) -> None:
    with Scorer(f"{USER}:raises", workers=workers) as scorer:
        scorer.submit(sample("x"), prompt())
        deadline = time.monotonic() + 60
        with pytest.raises(RewardError, match=r"raised KeyError: 'x'.*on prompt 7"):
            while time.monotonic() < deadline:
                scorer.poll()
                time.sleep(0.01)


def test_a_hanging_reward_ends_a_poll(workers: int) -> None:
    with Scorer(f"{USER}:hangs", workers=workers, timeout=0.3) as scorer:
        scorer.submit(sample("hang"), prompt())
        deadline = time.monotonic() + 60
        with pytest.raises(RewardError, match=r"took longer than --reward-timeout 0\.3 s"):
            while time.monotonic() < deadline:
                scorer.poll()
                time.sleep(0.01)


# ------------------------------------------------------------------------------------------------------------- failures


def test_a_reward_out_of_its_range_is_an_error(workers: int) -> None:
    message = r":length' returned 0\.5, which is outside of its range \[0, 0\.3\], on prompt 7"
    with (
        pytest.raises(RewardError, match=message),
        Scorer(f"{USER}:length", workers=workers, limits=(0.0, 0.3)) as scorer,
    ):
        scorer.score([sample("a" * 50)], [prompt()])


def test_a_range_is_declared_with_the_reward_or_by_option() -> None:
    if "bounded" not in known_rewards():
        register("bounded", range=(0.0, 1.0))(bounded)
    with pytest.raises(RewardError, match=r"'bounded' returned 7, which is outside of its range \[0, 1\]"):
        judged("bounded", "x")
    wide = DataOptions(reward="bounded", reward_range=(0.0, 10.0))
    assert Scorer.from_options(wide, "ledger").limits == (0.0, 10.0)
    assert Scorer.from_options(DataOptions(), "ledger").limits == (0.0, 1.0)


def bounded(response: str, label: Any) -> float:
    return 7.0


def test_code_is_run_only_if_allowed() -> None:
    with pytest.raises(RewardError, match="'code_tests' executes what the model writes: set --allow-code-execution"):
        Scorer.from_options(DataOptions(reward="code_tests"), "ledger")
    with pytest.raises(RewardError, match="'rewards' executes what the model writes"):
        Scorer.from_options(DataOptions(rewards={"*": ["ledger", "code_tests"]}), "ledger")
    Scorer.from_options(DataOptions(reward="code_tests", allow_code_execution=True), "ledger").close()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", r"raised KeyError: 'x' \(.*user_rewards\.py:\d+\)"),
        ("exits", r"raised SystemExit: 0 \(.*user_rewards\.py:\d+\)"),
        ("nan", "returned nan, which is not finite,"),
        ("infinite_part", "returned inf for 'part', which is not finite,"),
        ("text", "returned str instead of a number"),
        ("nothing", "returned NoneType instead of a number"),
        ("array", "returned ndarray instead of a number"),
        ("unsendable", "returned function instead of a number"),
        ("no_score", r"returned a dict without 'score' \(it has 'quality'\)"),
    ],
)
def test_a_reward_that_fails_is_named_with_its_prompt(name: str, message: str) -> None:
    for workers in (0, 1) if name in ("exits", "unsendable") else (0,):
        with pytest.raises(RewardError, match=rf"'{USER}:{name}' {message} on prompt 7 \(sample 3-7-0\)"):
            judged(f"{USER}:{name}", "x", workers=workers)


def test_the_exception_is_kept_as_the_cause() -> None:
    with pytest.raises(RewardError) as caught:
        judged(f"{USER}:raises", "x")
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_reward_that_hangs_is_an_error(workers: int) -> None:
    began = time.monotonic()
    with pytest.raises(
        RewardError, match=r":hangs' took longer than --reward-timeout 0.5 s on prompt 7 \(sample 3-7-1\)"
    ):
        judged(f"{USER}:hangs", "fine", "hang", "fine", workers=workers, timeout=0.5)
    assert time.monotonic() - began < 60


def test_a_worker_stops_what_a_thread_could_not() -> None:
    with pytest.raises(RewardError, match=r"took longer than --reward-timeout 0\.5 s"):
        judged(f"{USER}:hangs_with_the_interpreter", "hang", workers=1, timeout=0.5)


def test_a_time_out_that_is_borne_gives_its_score_and_the_rest_is_judged() -> None:
    """The same in a worker is seen with math_verify."""
    from tests.rl.rewards import user_rewards

    if "patient" not in known_rewards():
        register("patient", timeout_score=0.25)(user_rewards.hangs)
    samples = judged("patient", "fine", "hang", "fine", "hang", timeout=0.5)
    assert [s.reward for s in samples] == [1.0, 0.25, 1.0, 0.25]
    assert [s.reward_components["timeout"] for s in samples] == [0.0, 1.0, 0.0, 1.0]


def test_a_worker_that_dies_is_an_error() -> None:
    with pytest.raises(RewardError, match=r":dies' ended its worker process \(status 3\) on prompt 7"):
        judged(f"{USER}:dies", "x", workers=1)


def test_workers_end_with_their_parent() -> None:
    """Even in the middle of a reward, and although the parent does not say goodbye."""
    program = f"""
import os, threading, time
from rhymemeg.rl.rewards.pool import WorkerPool
pool = WorkerPool("r", "{USER}:hangs", {{}}, 1, 60.0)
pool.submit(0, ("hang", None, {{}}))
threading.Thread(target=pool.advance, args=(True,), daemon=True).start()
while not (pool._workers and pool._workers[0].task is not None):
    time.sleep(0.05)
print(pool._workers[0].process.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    pid = int(done.stdout)
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
                return
        except FileNotFoundError:
            return
        time.sleep(0.1)
    pytest.fail(f"worker {pid} outlives its parent")


# ---------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("math_verfy", "unknown reward 'math_verfy', did you mean math_verify"),
        (f"{USER}:lenght", "has no 'lenght', did you mean length"),
        (f"{USER}:not_a_function", "is not a function but int"),
        ("no_such_module:f", r"no module named 'no_such_module' \(is its folder in PYTHONPATH\?\)"),
        (
            "tests.rl.rewards.broken_module:f",
            r"importing tests\.rl\.rewards\.broken_module raised ValueError: this module",
        ),
        (":f", "expected module:function"),
        ("module:", "expected module:function"),
    ],
)
def test_a_name_that_cannot_be_resolved(name: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        Scorer(name)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        (f"{USER}:too_few_parameters", {}, "cannot be called as fn"),
        (f"{USER}:too_many_parameters", {}, "cannot be called as fn.*references"),
        (f"{USER}:detailed", {"wieght": 1}, "takes no argument 'wieght', did you mean weight"),
        ("exact_match", {"ignorecase": True}, "takes no argument 'ignorecase', did you mean ignore_case"),
    ],
)
def test_parameters_are_checked_before_anything_is_sampled(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(RewardError, match=message):
        Scorer(name, arguments=arguments)


def test_a_function_that_workers_cannot_import_is_refused() -> None:
    def local(response: str, label: Any) -> float:
        return 0.0

    if "local" not in known_rewards():
        register("local")(local)
    assert judged("local", "x")[0].reward == 0.0
    with pytest.raises(RewardError, match="put the function into a module, or set --reward-workers 0"):
        Scorer("local", workers=1)


def test_names_are_taken_once() -> None:
    for name in ("ledger", "auto", "a:b", "ledger_like"):
        with pytest.raises(RewardError):
            register(name)(lambda response, label: 0.0)


def test_auto_is_the_reward_of_the_prompts() -> None:
    assert Scorer.from_options(DataOptions(), "ledger").reward == resolve("ledger")
    assert Scorer.from_options(DataOptions(reward="exact_match"), "ledger").reward.name == "exact_match"


def test_importing_rewards_is_light() -> None:
    heavy = ("torch", "vllm", "sympy", "reasoning_gym", "transformers")
    program = f"import sys, rhymemeg.rl.rewards; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.fixture(autouse=True)
def importable_tests(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Workers find this package as the tests do, wherever pytest was started."""
    root = os.path.abspath(os.path.join(os.path.dirname(__file__), *[".."] * 3))
    monkeypatch.syspath_prepend(root)
    monkeypatch.setenv("PYTHONPATH", root)
    yield
