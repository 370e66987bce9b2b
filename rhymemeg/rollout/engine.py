"""The vLLM engine of one rank, driven step by step.

World size W and engine tensor parallelism T give W / T engines; ranks e T .. e T + T - 1 are engine e and must make the
same calls in the same order (the model's collectives connect nothing else). The first of them is the engine's *leader*.

    engine = RolloutEngine.start(config, arch, runtime, tokenizer)
    engine.add(sample, sampling, seed)            # new, or paused earlier: tokens that it has are kept
    while engine.has_unfinished():
        output = engine.step()                    # fills the samples in place
    engine.load_weights(named_tensors, version)   # only while nothing runs

Between two steps the caller may add, `pause` (tokens kept, to be added again here or elsewhere) and `abort`. Every
token gets the log-probability that the engine gave it (`SamplingOptions` says of which distribution) and the version of
the weights at that step. A request samples from a generator of its own, so a response does not depend on what else
runs. A KV cache that is too small for all requests costs time and nothing else: vLLM preempts requests and recomputes
them.

A paused request continues with a fresh seed (`samples.sample_seed` takes the tokens so far), because its generator is
gone; greedy continuations equal the uninterrupted ones.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from rhymemeg.arch import ModelArch
from rhymemeg.config import Config
from rhymemeg.errors import RolloutError, WeightSyncError
from rhymemeg.rollout.routing import Part, assemble
from rhymemeg.rollout.samples import Sample, SampleId
from rhymemeg.rollout.spec import EngineSpec, SamplingOptions
from rhymemeg.rollout.stop import StopStrings
from rhymemeg.rollout.vllm_compat import Output, VllmEngine

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["EngineSpec", "RolloutEngine", "SamplingOptions", "StepOutput"]

NO_WEIGHTS = -1


class Ranks(Protocol):
    """The part of `parallel.runtime.Runtime` that an engine needs."""

    rank: int
    local_rank: int
    world_size: int
    device_type: str


@dataclass
class StepOutput:
    """One engine step: samples that finished in it, tokens emitted by it, requests running and waiting after it."""

    finished: list[Sample]
    tokens: int
    running: int
    waiting: int


@dataclass
class _Request:
    request_id: str
    sample: Sample
    stop: StopStrings | None
    routing: list[Part] = field(default_factory=list)


class RolloutEngine:
    """See the module. `version` is that of the weights being served; -1: none (not loaded, or a load failed)."""

    def __init__(self, spec: EngineSpec, ranks: Ranks, tokenizer: Any = None) -> None:
        spec.check(ranks.world_size)
        tp = spec.tensor_parallel_size
        self.spec = spec
        self.engine_index, self.tp_rank = divmod(ranks.rank, tp)
        self.num_engines = ranks.world_size // tp
        self.engine_ranks = list(range(self.engine_index * tp, (self.engine_index + 1) * tp))
        self.version = 0 if spec.load_format == "auto" else NO_WEIGHTS
        self._tokenizer = tokenizer
        self._stop_strings: dict[tuple[str, ...], StopStrings] = {}
        self._requests: dict[str, _Request] = {}  # by request id, in the order of adding
        self._request_of: dict[SampleId, str] = {}
        self._added = 0
        self._asleep = False
        self.vllm = VllmEngine(spec, ranks.rank, ranks.local_rank, ranks.world_size)

    @classmethod
    def start(
        cls,
        config: Config,
        arch: ModelArch,
        ranks: Ranks,
        tokenizer: Any = None,
        *,
        speculative: Mapping[str, Any] | None = None,
        worker_extension: str = "",
        load_format: str = "auto",
    ) -> RolloutEngine:
        """Start the engine of this rank; all ranks at the same time. `tokenizer` (of transformers) is needed for stop
        strings and fills in the text of finished samples on the leader."""
        spec = EngineSpec.from_config(
            config,
            arch,
            ranks.device_type,
            speculative=speculative,
            worker_extension=worker_extension,
            load_format=load_format,
        )
        return cls(spec, ranks, tokenizer)

    @property
    def is_leader(self) -> bool:
        """Whether this rank speaks for its engine."""
        return self.tp_rank == 0

    # ------------------------------------------------------------------------------------------------------- requests

    def add(self, sample: Sample, sampling: SamplingOptions, seed: int) -> None:
        """Queue a sample. One that has tokens already continues after them, with as many tokens less to go."""
        sid, had = sample.sample_id, len(sample.response_ids)
        if self._asleep or self.version == NO_WEIGHTS:
            raise RolloutError(f"engine {self.engine_index} has no weights: sample {sid} cannot be added")
        if sid in self._request_of:
            raise RolloutError(f"sample {sid} is on engine {self.engine_index} already")
        if sample.finish_reason is not None:
            raise RolloutError(f"sample {sid} is complete ({sample.finish_reason}) and cannot be added")
        if len(sample.prompt_ids) > self.spec.max_prompt_len:
            raise RolloutError(
                f"prompt {sid.prompt_id} has {len(sample.prompt_ids)} tokens, more than --max-prompt-len "
                f"{self.spec.max_prompt_len}"
            )
        tokens = [*sample.prompt_ids, *sample.response_ids]
        if not sample.prompt_ids or min(tokens) < 0 or max(tokens) >= self.spec.arch.vocab_size:
            raise RolloutError(
                f"prompt {sid.prompt_id} is empty or has a token outside the vocabulary of {self.spec.arch.vocab_size}"
            )
        if sampling.max_response_len > self.spec.max_response_len:
            raise RolloutError(
                f"sample {sid}: a response of {sampling.max_response_len} tokens is asked for, the engine was started "
                f"for --max-response-len {self.spec.max_response_len}"
            )
        if had >= sampling.max_response_len:
            raise RolloutError(f"sample {sid} has {had} tokens already, the limit is {sampling.max_response_len}")
        stop = self._stop(sampling.stop) if sampling.stop else None
        request_id = f"{sid}-{self._added}"
        try:
            self.vllm.add(
                request_id,
                tokens,
                sampling,
                sampling.max_response_len - had,
                seed,
                sorted({*self.spec.stop_token_ids, *sampling.stop_token_ids}),
            )
        except ValueError as error:
            raise RolloutError(f"prompt {sid.prompt_id} (sample {sid}) is refused: {error}") from error
        self._added += 1
        sample.engine = self.engine_index
        self._requests[request_id] = _Request(request_id, sample, stop)
        self._request_of[sid] = request_id

    def _stop(self, strings: tuple[str, ...]) -> StopStrings:
        if self._tokenizer is None:
            raise RolloutError("--stop needs a tokenizer, and the engine was started without one")
        return self._stop_strings.setdefault(strings, StopStrings(strings, self._tokenizer))

    def step(self) -> StepOutput:
        """One step of the engine, on all its ranks. Without requests it returns at once."""
        finished: list[Sample] = []
        tokens, version = 0, self.version
        for out in self.vllm.step() if self._requests else ():
            request = self._requests[out.request_id]
            sample = request.sample
            before = len(sample.response_ids)
            request.routing += out.routing
            sample.response_ids += out.token_ids
            sample.log_probs += out.log_probs
            if not all(map(math.isfinite, out.log_probs)) or len(out.log_probs) != len(out.token_ids):
                raise RolloutError(
                    f"engine {self.engine_index} gave sample {sample.sample_id} the log-probabilities {out.log_probs} "
                    f"at token {before} (weights of version {version}): weights or activations are not finite"
                )
            finish = out.finish
            if finish not in (None, "stop", "length"):
                raise RolloutError(f"engine {self.engine_index} ended sample {sample.sample_id} with {finish!r}")
            if request.stop is not None and (end := request.stop.first(sample.response_ids, before)) is not None:
                if finish is None:
                    self.vllm.abort([request.request_id])
                if finish is None or end < len(sample.response_ids):
                    finish = "stop"
                del sample.response_ids[end:], sample.log_probs[end:]
            emitted = len(sample.response_ids) - before
            sample.versions += [version] * emitted
            tokens += emitted
            if finish is not None:
                sample.finish_reason = finish  # type: ignore[assignment]
                self._forget(request)
                if self._tokenizer is not None and self.is_leader:
                    sample.text = self._tokenizer.decode(sample.response_ids, skip_special_tokens=True)
                finished.append(sample)
        running, waiting = self.vllm.request_counts()
        return StepOutput(finished, tokens, running, waiting)

    def _forget(self, request: _Request) -> None:
        sample = request.sample
        read = len(sample.prompt_ids) + len(sample.response_ids) - 1
        sample.routing = assemble(read, request.routing, sample.routing, self.spec.arch.num_experts)
        del self._requests[request.request_id]
        del self._request_of[request.sample.sample_id]

    def pause(self, ids: Iterable[SampleId] | None = None) -> list[Sample]:
        """Take requests (None: all) off the engine, with the tokens they have; they can be added again on any
        engine."""
        chosen = list(self._request_of) if ids is None else list(ids)
        requests = [self._requests[self._request_id(sid)] for sid in chosen]
        self.vllm.abort([request.request_id for request in requests])
        for request in requests:
            self._forget(request)
        return [request.sample for request in requests]

    def abort(self, ids: Iterable[SampleId] | None = None) -> list[Sample]:
        """End requests (None: all) for good: finish reason "abort", tokens so far kept."""
        samples = self.pause(ids)
        for sample in samples:
            sample.finish_reason = "abort"
        return samples

    def _request_id(self, sid: SampleId) -> str:
        try:
            return self._request_of[sid]
        except KeyError:
            raise RolloutError(f"sample {sid} is not on engine {self.engine_index}") from None

    def has_unfinished(self) -> bool:
        """Whether a request is queued or running."""
        return bool(self._requests)

    @property
    def unfinished(self) -> list[Sample]:
        """Samples queued or running, in the order of adding."""
        return [request.sample for request in self._requests.values()]

    @property
    def num_running(self) -> int:
        return self.vllm.request_counts()[0]

    # -------------------------------------------------------------------------------------------------------- scoring

    def score(self, token_ids: Sequence[Sequence[int]], prompt_lens: Sequence[int]) -> list[list[float]]:
        """Log-probabilities, log softmax(logits) at temperature 1, that the engine gives the tokens after each
        sequence's prompt. Computed in one pass over the sequence, not token by token. Only while nothing runs."""
        self._refuse_while_running("score")
        if self._asleep or self.version == NO_WEIGHTS:
            raise RolloutError(f"engine {self.engine_index} has no weights: nothing to score with")
        room = self.spec.max_model_len - 1
        for number, tokens in enumerate(token_ids):
            if len(tokens) > room:
                raise RolloutError(f"sequence {number} to score has {len(tokens)} tokens, the engine takes {room}")
            self.vllm.add(f"score-{number}", tokens, SamplingOptions(temperature=0), 1, 0, prompt_log_probs=True)
        outputs: dict[str, Output] = {}
        while len(outputs) < len(token_ids):
            # A request of one token gives its only output when its whole prompt is done.
            outputs.update((out.request_id, out) for out in self.vllm.step())
        scores = []
        for number, start in enumerate(prompt_lens):
            # Entry i belongs to token i + 1: the first token has no log-probability.
            values = outputs[f"score-{number}"].prompt_log_probs
            assert values is not None and len(values) == len(token_ids[number]) - 1
            scores.append(values[start - 1 :])
        return scores

    # -------------------------------------------------------------------------------------------------------- weights

    def load_weights(
        self, weights: Iterable[tuple[str, Tensor]], version: int, expected: Collection[str] | None = None
    ) -> None:
        """Serve new weights: the tensors of a Hugging Face checkpoint under their names, all of them, complete (this
        rank takes its part). Refused while requests run: finish or pause them first.

        vLLM keeps a tensor until its layer is complete: an iterator must not reuse the memory of a tensor that it has
        yielded. `expected` are the names that must come, each once; None: those of a checkpoint of the model. The
        iterator is always read to its end, also when a name is missing, unknown or repeated; WeightSyncError is raised
        then, and the engine has no weights (`version` is -1) until a load succeeds. After an exception from the
        iterator itself the engine cannot be loaded again."""
        self._refuse_while_running("load weights")
        if expected is None:
            from rhymemeg.weight_sync.layouts import hf_tensors

            expected = hf_tensors(self.spec.arch).keys()
        self.version = NO_WEIGHTS
        problems: list[str] = []
        self.vllm.reload_weights(self._complete(weights, expected, problems))
        if problems:
            more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
            raise WeightSyncError(f"weight update {version} of engine {self.engine_index}: {problems[0]}{more}")
        self.version = version

    @staticmethod
    def _complete(
        weights: Iterable[tuple[str, Tensor]], expected: Collection[str], problems: list[str]
    ) -> Iterator[tuple[str, Tensor]]:
        """Pass on what is expected, each name once, and note what is wrong."""
        missing = set(expected)
        for name, tensor in weights:
            if name in missing:
                missing.remove(name)
                yield name, tensor
            else:
                problems.append(f"tensor {name!r} " + ("came twice" if name in expected else "is unknown"))
        if missing:
            shown = ", ".join(sorted(missing)[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
            problems.insert(0, f"the engine did not receive {shown}")

    def _refuse_while_running(self, what: str) -> None:
        if self._requests:
            raise RolloutError(
                f"engine {self.engine_index} cannot {what} while {len(self._requests)} requests run (the first: "
                f"{next(iter(self._request_of))}); finish or pause them"
            )

    # --------------------------------------------------------------------------------------------------------- memory

    def sleep(self, level: int = 1) -> None:
        """Give the engine's memory to the trainer. Level 1 keeps the weights in host memory, level 2 drops them, so
        that `load_weights` must follow. Without sleep mode (CPU, or switched off) nothing happens."""
        self._refuse_while_running("sleep")
        if self.spec.enable_sleep_mode and not self._asleep:
            self.vllm.sleep(level)
            self._asleep = True
            if level > 1:
                self.version = NO_WEIGHTS

    def wake(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory back: ["weights"] before a weight update, ["kv_cache"] after it, None for both."""
        if self.spec.enable_sleep_mode and self._asleep:
            self.vllm.wake(tags)
            self._asleep = tags is not None and "kv_cache" not in tags

    def close(self) -> None:
        """Free everything. The engine cannot be used afterwards."""
        self._requests.clear()
        self._request_of.clear()
        self.vllm.close()
