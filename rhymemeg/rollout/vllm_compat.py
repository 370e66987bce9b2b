"""Every name of vLLM that may change with its version, in one place. Written for vLLM 0.32, the same on CPU and GPU.

`prepare_environment` must run before vLLM is imported, which takes many seconds and happens inside the functions here.
`VllmEngine` is vLLM's engine in this process, reduced to what the rollout needs: requests go straight into the engine
core and its outputs come straight out. vLLM's own front end (tokenizer, detokenizer, a RequestOutput a token) is not
used; only its checks of a new request are.

All ranks of a tensor-parallel engine must make the same calls in the same order: each has its own scheduler, and only
the model's collectives connect them.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rhymemeg.arch import ModelArch
from rhymemeg.errors import ConfigError, RolloutError
from rhymemeg.rollout.routing import Part, expert_dtype
from rhymemeg.rollout.spec import EngineSpec, SamplingOptions

if TYPE_CHECKING:
    from torch import Tensor

SUPPORTED = ("0.32",)
# The CPU builds in which `rollout.plugin` replaces rejection sampling, and the update of experts.
FAULTY_CPU_SAMPLING = ("0.32", "0.33")
FAULTY_CPU_EXPERTS = ("0.32",)


# ---------------------------------------------------------------------------------------------------------- environment


def prepare_environment(device_type: str) -> None:
    """Set what vLLM reads from the environment; before its import. What the user has set stays, except what the
    in-process engine cannot do without."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # A variable of this name would override the size that each engine asks for, and only takes whole GiB.
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    defaults = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    if device_type == "cpu":
        # Its warnings on CPU are about libraries that could be preloaded, about sleep mode, about Triton; its errors
        # are dumps of the configuration beside the exception, which comes anyway.
        defaults["VLLM_LOGGING_LEVEL"] = "CRITICAL"
        # Several ranks share the cores: vLLM must not pin each of them to all.
        defaults["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # torch says at the import of vLLM that there is no Triton, which is as it should be.
        logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def version() -> str:
    """Version of the installed vLLM; RolloutError if there is none."""
    try:
        import vllm
    except ImportError as error:
        raise RolloutError(f"vLLM cannot be imported: {error}") from error
    return str(vllm.__version__)


def _is_version(known: Sequence[str]) -> bool:
    return ".".join(version().split("+")[0].split(".")[:2]) in known


def check_version() -> None:
    """Refuse a vLLM that this module was not written for."""
    if not _is_version(SUPPORTED):
        raise RolloutError(f"vLLM {version()} is installed; this program works with {', '.join(SUPPORTED)}")


@contextmanager
def _confined(device_type: str) -> Iterator[None]:
    """Start an engine without what vLLM's CPU worker does to the process around it, because the trainer lives there
    too: it binds all memory to one NUMA node, disables torch.set_num_threads, and changes what child processes
    inherit."""
    import warnings

    import torch

    if device_type != "cpu":
        yield
        return
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    names = ("LOCAL_WORLD_SIZE", "LD_PRELOAD", "NUMEXPR_MAX_THREADS")
    before = {name: os.environ.get(name) for name in names}
    set_num_threads = torch.set_num_threads
    operators: Any = torch.ops._C
    bind_memory = operators.init_cpu_memory_env
    operators.init_cpu_memory_env = lambda nodes: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        operators.init_cpu_memory_env = bind_memory
        torch.set_num_threads = set_num_threads
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# ---------------------------------------------------------------------------------------- replacements (rollout.plugin)


def is_cpu_build(of: Sequence[str]) -> bool:
    """Whether this is a CPU build of one of the versions."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu()) and _is_version(of)


def replace_cpu_sampling(
    expand: Callable[..., None], random_sample: Callable[..., None], sample_recovered: Callable[..., None]
) -> None:
    """Put the functions of `rollout.plugin` where vLLM looks for its CPU kernels. They take effect when a worker
    starts, or at once where one has started; vLLM passes its kernels' arguments by position, in the order unpacked
    below."""
    from vllm.triton_utils import dispatcher
    from vllm.utils import cpu_triton_utils as kernels

    if getattr(kernels, "_rhymemeg", False):
        return
    own_random = kernels._rejection_random_sample_kernel_impl
    own_recovered = kernels._sample_recovered_tokens_kernel_impl

    def expand_kernel(*args: Any) -> None:
        expand(*args[:5])

    def random_kernel(*args: Any) -> None:
        output, cu_num_draft, draft, draft_probs, target_probs, bonus, recovered, uniform, is_greedy, *rest = args
        if draft_probs is None and not rest[-1]:  # the last one is SYNTHETIC_MODE
            random_sample(output, cu_num_draft, draft, target_probs, bonus, recovered, uniform, is_greedy)
        else:
            own_random(*args)

    def recovered_kernel(*args: Any) -> None:
        output, cu_num_draft, draft, draft_probs, target_probs, inv_q, *_ = args
        if draft_probs is None:
            sample_recovered(output, cu_num_draft, draft, target_probs, inv_q)
        else:
            own_recovered(*args)

    kernels._expand_kernel_impl = expand_kernel
    kernels._rejection_random_sample_kernel_impl = random_kernel
    kernels._sample_recovered_tokens_kernel_impl = recovered_kernel
    kernels._rhymemeg = True
    sampler = "vllm.v1.sample.rejection_sampler."
    if sampler + "expand_kernel" in dispatcher._registry:
        names = {
            "expand_kernel": expand_kernel,
            "rejection_random_sample_kernel": random_kernel,
            "sample_recovered_tokens_kernel": recovered_kernel,
        }
        dispatcher.register_kernels({sampler + name: function for name, function in names.items()})


def replace_cpu_verification(verify: Callable[..., Any]) -> None:
    """Verify drafts by `cpu_sampling.verify` where a request asks for nothing but temperature, top-k, top-p and the
    log-probabilities of its tokens; else vLLM goes its own way."""
    import torch
    from vllm.v1.outputs import LogprobsTensors, SamplerOutput
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    own = RejectionSampler.forward
    if getattr(own, "_rhymemeg", False):
        return

    def forward(sampler: Any, metadata: Any, draft_probs: Any, logits: Tensor, sampling: Any) -> Any:
        if draft_probs is not None or not _samples_simply(sampler, sampling):
            return own(sampler, metadata, draft_probs, logits, sampling)
        restrict = None
        if sampling.top_k is not None or sampling.top_p is not None:
            rows = torch.tensor(metadata.num_draft_tokens) + 1

            def restrict(scaled: Tensor) -> Tensor:
                values = (
                    None if x is None else x.repeat_interleave(rows, output_size=len(scaled))
                    for x in (sampling.top_k, sampling.top_p)
                )
                return apply_top_k_top_p(scaled, *values)

        done = verify(
            logits.float(),
            metadata.draft_token_ids,
            metadata.num_draft_tokens,
            temperature=None if sampling.all_greedy else sampling.temperature,
            generators=sampling.generators,
            draw=torch.ops._C.fused_gumbel_argmax,
            restrict=restrict,
        )
        log_probs = None
        if sampling.max_num_logprobs is not None:
            ids = done.tokens.view(-1, 1).clamp(min=0)
            log_probs = LogprobsTensors(ids, done.log_probs.unsqueeze(1), done.ranks)
        return SamplerOutput(sampled_token_ids=done.tokens, logprobs_tensors=log_probs)

    forward._rhymemeg = True  # type: ignore[attr-defined]
    RejectionSampler.forward = forward


def _samples_simply(sampler: Any, sampling: Any) -> bool:
    """Whether a batch is one for `cpu_sampling.verify`."""
    holder = sampling.thinking_budget_state_holder
    return (
        sampler.sampler.logprobs_mode == "processed_logprobs"
        and not sampler.synthetic_mode
        and not sampler.use_fp64_gumbel
        and sampling.max_num_logprobs in (None, 0)
        and sampling.no_penalties
        and sampling.allowed_token_ids_mask is None
        and not sampling.bad_words_token_ids
        and not sampling.logprob_token_ids
        and (holder is None or not holder.has_tracked_requests())
        # vLLM's own processors are always there, most of the time with nothing to do.
        and all(_IDLE.get(type(p).__name__, _busy)(p) for p in sampling.logitsprocs.all)
    )


def _busy(processor: Any) -> bool:
    return False


_IDLE: dict[str, Callable[[Any], bool]] = {
    "MinPLogitsProcessor": lambda p: not p.min_p_count,
    "LogitBiasLogitsProcessor": lambda p: not p.biases,
    "MinTokensLogitsProcessor": lambda p: not p.min_toks,
}


def check_cpu_sampling() -> None:
    """ConfigError if this is a CPU build whose rejection sampling draws from the wrong distribution and the replacements
    of `rollout.plugin` are not in use. It tries what the faulty kernels get wrong."""
    if not is_cpu_build(FAULTY_CPU_SAMPLING):
        return
    import torch
    from vllm.v1.sample import rejection_sampler

    values = torch.tensor([3.0, 5.0])
    ends = torch.tensor([2, 3], dtype=torch.int32)
    try:
        # The original leaves its output as the allocator gave it: not one value may be right by accident.
        works = all(
            rejection_sampler.expand_batch_to_tokens(values + k, ends, 3).tolist() == [3.0 + k, 3.0 + k, 5.0 + k]
            for k in range(4)
        )
    except Exception:
        works = False
    if not works:
        raise ConfigError(
            "drafts cannot be verified: on CPU, vLLM's own rejection sampling draws from the wrong distribution, and "
            "rhymemeg's replacements are not in use in this process. They come with the entry point "
            "vllm.general_plugins of the installed package; VLLM_PLUGINS must not leave out 'rhymemeg'. Otherwise call "
            "rhymemeg.rollout.plugin.register() before the engine starts"
        )


def replace_cpu_expert_update() -> None:
    """Prepack the weights of experts on every load. vLLM does it on the first one only; a later one copies the plain
    layout into the memory of the packed one, which gives wrong outputs without an error."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    own = UnquantizedFusedMoEMethod._setup_kernel
    if getattr(own, "_rhymemeg", False):
        return

    def setup_kernel(self: Any, layer: Any, w13: Tensor, w2: Tensor) -> None:
        update = self.moe_kernel is not None
        own(self, layer, w13, w2)
        if update:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    setup_kernel._rhymemeg = True  # type: ignore[attr-defined]
    UnquantizedFusedMoEMethod._setup_kernel = setup_kernel


def replace_cpu_compiled_ranks() -> None:
    """Undo the compilation of the function that ranks the sampled token among the vocabulary: with log-probabilities
    on, it costs seconds of compiling at the first token and then more in guards than it saves."""
    import vllm.v1.sample.ops.logprobs as ops
    import vllm.v1.sample.sampler as sampler

    plain = getattr(ops.batched_count_greater_than, "_torchdynamo_orig_callable", None)
    if plain is not None:
        ops.batched_count_greater_than = sampler.batched_count_greater_than = plain


def replace_cpu_shared_memory_name(unique: Callable[[str], str]) -> None:
    """Pass the names of the shared memory of tensor-parallel ranks through `unique`."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    own = _CPUSHMDistributed.make_group_name
    if getattr(own, "_rhymemeg", False):
        return

    def make_group_name(communicator: Any) -> str:
        return unique(own(communicator))

    make_group_name._rhymemeg = True  # type: ignore[attr-defined]
    _CPUSHMDistributed.make_group_name = staticmethod(make_group_name)


# --------------------------------------------------------------------------------------------------------------- engine


class Output(NamedTuple):
    """What one request got in one step. `finish` is None, "stop", "length", "abort", "error" or "repetition"."""

    request_id: str
    token_ids: list[int]
    log_probs: list[float]
    finish: str | None
    prompt_log_probs: list[float] | None
    routing: Sequence[Part] = ()


class RoutingCapture:
    """Experts of every token, on CPU. vLLM returns them itself (`enable_return_routed_experts`) with its second model
    runner only, which needs Triton; here the callback that its routers have for that purpose writes them down, and the
    batch of the step says whose they are. Tokens out of the prefix cache pass no router, so there must be none."""

    def __init__(self, model: Any, runner: Any, arch: ModelArch, max_tokens: int) -> None:
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        shape = (max_tokens, arch.num_layers, arch.num_experts_per_tok)
        self._rows = np.zeros(shape, expert_dtype(arch.num_experts))
        self._runner, self._ran = runner, False
        for module in model.modules():
            if isinstance(module, MoERunner):
                module.router.set_capture_fn(partial(self._keep, module.layer_id))

    def _keep(self, layer: int, experts: Tensor) -> None:
        self._rows[: len(experts), layer] = experts.numpy()
        self._ran = True

    def take(self) -> dict[str, Part]:
        """What the step has read, by request. Rows of drafted tokens that were not accepted lie beyond the request's
        end, and the next step reads those positions again."""
        if not self._ran:
            return {}
        self._ran = False
        requests = list(self._runner.input_batch.req_ids)
        bounds = self._runner.query_start_loc.np[: len(requests) + 1].tolist()
        positions = self._runner.positions
        return {
            request: (int(positions[start]), self._rows[start:end].copy())
            for request, start, end in zip(requests, bounds, bounds[1:])
            if end > start
        }


class VllmEngine:
    """See the module. Raises RolloutError where vLLM refuses to start."""

    # Engines of this process; all of them use vLLM's one set of process groups.
    _alive = 0

    def __init__(self, spec: EngineSpec, rank: int, local_rank: int, world_size: int) -> None:
        prepare_environment(spec.device_type)
        check_version()
        for name, value in (("RANK", rank), ("LOCAL_RANK", local_rank), ("WORLD_SIZE", world_size)):
            os.environ.setdefault(name, str(value))
        from vllm import SamplingParams
        from vllm.engine.arg_utils import EngineArgs
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.llm_engine import LLMEngine

        from rhymemeg.rollout import plugin

        plugin.register()
        self._params_type, self._tokens_input = SamplingParams, tokens_input
        self._tied = spec.arch.tie_word_embeddings
        try:
            with _confined(spec.device_type):
                self._llm = LLMEngine.from_engine_args(EngineArgs(**_engine_args(spec)))
        except ValueError as error:
            text = " ".join(str(error).split())
            option = "--vllm-kv-cache-memory-gib" if spec.device_type == "cpu" else "--vllm-gpu-memory-utilization"
            if "KV cache" in text or "kv cache" in text or "cache blocks" in text or "memory" in text:
                raise RolloutError(f"the engine has too little memory for its KV cache ({option}): {text}") from error
            raise ConfigError(f"vLLM refuses the engine: {text}") from error
        self._client = self._llm.engine_core
        # vLLM's own shutdown, which would run when this object is collected, destroys all groups of torch.distributed.
        self._client._finalizer.detach()
        VllmEngine._alive += 1
        self._core = self._client.engine_core
        self._routed: dict[str, int] = {}  # tokens of a request whose experts vLLM has returned
        self._capture: RoutingCapture | None = None
        if spec.return_routing and spec.device_type == "cpu":
            tokens = spec.batched_tokens or spec.max_model_len
            self._capture = RoutingCapture(self.model, self.model_runner, spec.arch, tokens)
        self._tasks = self._llm.get_supported_tasks()

    # ------------------------------------------------------------------------------------------------------- requests

    def add(
        self, request_id: str, prompt_ids: Sequence[int], sampling: SamplingOptions, max_tokens: int, seed: int,
        stop_token_ids: Sequence[int] = (), prompt_log_probs: bool = False,
    ) -> None:  # fmt: skip
        """Queue a request. Raises ValueError (vLLM's own words) if it is refused."""
        params = self._params_type(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=max_tokens,
            seed=seed,
            stop_token_ids=list(stop_token_ids),
            # End-of-sequence tokens are among stop_token_ids, whichever file of the model names them.
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            prompt_logprobs=0 if prompt_log_probs else None,
        )
        prompt = self._tokens_input(list(prompt_ids))
        self._client.add_request(self._llm.input_processor.process_inputs(request_id, prompt, params, self._tasks))

    def step(self) -> list[Output]:
        """One step of the engine: nothing, if it has no requests."""
        outputs = []
        results = self._client.get_output().outputs
        captured = {} if self._capture is None else self._capture.take()
        for out in results:
            logprobs, prompt = out.new_logprobs, out.new_prompt_logprobs_tensors
            outputs.append(
                Output(
                    out.request_id,
                    out.new_token_ids,
                    [] if logprobs is None else logprobs.logprobs[:, 0].tolist(),
                    None if out.finish_reason is None else str(out.finish_reason),
                    None if prompt is None else prompt.logprobs[:, 0].tolist(),
                    [captured[out.request_id]] if out.request_id in captured else self._returned(out),
                )
            )
        return outputs

    def _returned(self, out: Any) -> list[Part]:
        """Experts that vLLM returned: those of the next tokens of the request, from its first one on."""
        if out.routed_experts is None:
            return []
        start = self._routed.get(out.request_id, 0)
        self._routed[out.request_id] = start + len(out.routed_experts)
        if out.finish_reason is not None:
            del self._routed[out.request_id]
        return [(start, out.routed_experts)]

    def abort(self, request_ids: Sequence[str]) -> None:
        """Forget requests at once."""
        for request_id in request_ids:
            self._routed.pop(request_id, None)
        self._client.abort_requests(list(request_ids))

    def request_counts(self) -> tuple[int, int]:
        """Requests running and waiting."""
        running, waiting = self._core.scheduler.get_request_counts()
        return int(running), int(waiting)

    @property
    def kv_cache_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        cache = self._llm.vllm_config.cache_config
        return int(cache.num_gpu_blocks) * int(cache.block_size)

    # ------------------------------------------------------------------------------------------ weights, memory, worker

    @property
    def worker(self) -> Any:
        """vLLM's worker object of this rank (with the worker extension mixed in)."""
        return self._llm.model_executor.driver_worker.worker

    @property
    def model_runner(self) -> Any:
        """vLLM's model runner of this rank."""
        return self.worker.model_runner

    @property
    def model(self) -> Any:
        """The torch module of this rank."""
        return self.model_runner.get_model()

    def reload_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights by the tensors of a Hugging Face checkpoint, then drop what the old ones computed. A
        tensor is kept until its layer is complete, so a buffer must not be used again before this returns."""
        self.worker.reload_weights(weights_iterator=iter(weights))
        self._refresh_tied_output()
        if not self._llm.reset_prefix_cache():
            raise RolloutError("the prefix cache could not be reset after a weight update: requests still hold blocks")

    def _refresh_tied_output(self) -> None:
        """Give an output layer that is tied to the embedding the embedding's new weights. vLLM's reload processes only
        layers that receive tensors of their own; on CPU a tied output layer would go on with a packed copy of the old
        weights, without any error."""
        output = getattr(self.model, "lm_head", None)
        if not self._tied or output is None or not hasattr(output, "quant_method"):
            return
        embedding = self.model.model.embed_tokens
        if output is not embedding:
            output.weight = embedding.weight
        output.quant_method.process_weights_after_loading(output)

    def sleep(self, level: int) -> None:
        """Free memory: level 1 keeps the weights in host memory, level 2 drops them."""
        self._llm.sleep(level)

    def wake(self, tags: Sequence[str] | None) -> None:
        """Take memory back: "weights", "kv_cache" or (None) both."""
        self._llm.wake_up(None if tags is None else list(tags))

    def close(self) -> None:
        """Free the engine's memory and, with the last engine, vLLM's process groups; those of the trainer stay."""
        from vllm.distributed.parallel_state import destroy_model_parallel

        self._core.structured_output_manager.clear_backend()
        self._core.model_executor.shutdown()
        self._core.scheduler.shutdown()
        VllmEngine._alive -= 1
        if not VllmEngine._alive:
            destroy_model_parallel()
        del self._core, self._client, self._llm
        gc.unfreeze()  # vLLM froze what existed when it had started
        gc.collect()


def _engine_args(spec: EngineSpec) -> dict[str, Any]:
    """Arguments of vLLM's engine."""
    args: dict[str, Any] = {
        "model": spec.model,
        "skip_tokenizer_init": True,
        "dtype": spec.dtype,
        "seed": spec.seed,
        "load_format": spec.load_format,
        "use_tqdm_on_load": False,
        # Nothing of the model's generation_config.json: sampling is what the run's options say.
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "max_model_len": spec.max_model_len,
        "max_num_seqs": spec.max_num_seqs,
        "max_num_batched_tokens": spec.batched_tokens,
        "enable_chunked_prefill": spec.enable_chunked_prefill,
        "tensor_parallel_size": spec.tensor_parallel_size,
        "distributed_executor_backend": "external_launcher",
        "enforce_eager": spec.enforce_eager,
        "enable_prefix_caching": spec.enable_prefix_caching,
        "enable_sleep_mode": spec.enable_sleep_mode,
        "enable_expert_parallel": spec.enable_expert_parallel,
        "gpu_memory_utilization": spec.gpu_memory_utilization,
        "kv_cache_memory_bytes": spec.kv_cache_memory,
        "block_size": spec.block_size,
        # What a step returns must be decided on before the next is scheduled (pausing, stealing, drafting).
        "async_scheduling": False,
        "disable_log_stats": True,
    }
    if spec.return_routing and spec.device_type != "cpu":
        args["enable_return_routed_experts"] = True
    if spec.speculative is not None:
        args["speculative_config"] = dict(spec.speculative)
    if spec.worker_extension:
        args["worker_extension_cls"] = spec.worker_extension
    return args
