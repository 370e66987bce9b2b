"""One of two ranks of the tests of checkpoints and of losses that are not finite: torchrun checkpoint_worker.py
MODELS_FOLDER WORK_FOLDER

Writes WORK_FOLDER/results.json: for every check by name, True, or what was found instead."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import signal
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rhymemeg.arch import ModelArch
from rhymemeg.errors import CheckpointError, TrainingError
from rhymemeg.parallel.checkpoint_files import read_pieces
from rhymemeg.parallel.runtime import Runtime, init_runtime, shutdown, start_layout
from tests.parallel import cases
from tests.parallel.layout_worker import make_config

TP, PP, EP, SP, DISTRIBUTED = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "sequence_parallel",
    "use_distributed_optimizer",
)
MODEL = "qwen3_moe_mixed"


class Attack:
    """Unpickling this runs a command."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.trace}",)


class Checks:
    def __init__(self, models: Path, work: Path, runtime: Runtime) -> None:
        self.models, self.work, self.runtime = models, work, runtime
        self.results: dict[str, Any] = {}

    def actor(self, layout: dict[str, Any]) -> Any:
        from rhymemeg.parallel.actor import Actor

        config = make_config(layout)
        start_layout(self.runtime, config.parallel, seed=1)
        actor = Actor(config, ModelArch.from_pretrained(self.models / MODEL), self.runtime)
        actor.load_weights(self.models / MODEL)
        return actor

    def steps(self, actor: Any, n: int) -> list[dict[str, float]]:
        mine = cases.share(cases.micro_batches(), self.runtime.dp_rank, self.runtime.dp_size)
        return [actor.train_step(mine, cases.loss, cases.TEMPERATURE) for _ in range(n)]

    def error(self, what: Callable[[], Any]) -> list[str]:
        """The CheckpointError of each rank."""
        try:
            what()
            text = "no error"
        except CheckpointError as error:
            text = str(error)
        return self.runtime.all_gather_object(text)

    def fails_naming(self, name: str, text: str, what: Callable[[], Any]) -> None:
        self.runtime.barrier(name)  # rank 0 has made the damage
        errors = self.error(what)
        self.results[name] = True if all(text in e for e in errors) else errors

    def copy(self, source: Path, name: str) -> Path:
        target = self.work / name
        if self.runtime.is_rank0:
            shutil.copytree(source, target)
        self.runtime.barrier(name)
        return target

    def forge(self, folder: Path, name: str, change: Callable[[bytes], bytes]) -> None:
        """Change a file and, as an attacker would, its entry in the manifest."""
        if self.runtime.is_rank0:
            file, manifest = folder / name, folder / "manifest.json"
            file.write_bytes(change(file.read_bytes()))
            listed = json.loads(manifest.read_text())
            listed["files"][name] = {"size": file.stat().st_size, "crc32": zlib.crc32(file.read_bytes())}
            manifest.write_text(json.dumps(listed))
        self.runtime.barrier("forge")

    def not_finite(self) -> None:
        """A loss or gradient that is not finite on one data-parallel rank stops all, and no weight has moved."""
        actor = self.actor({})
        batches = cases.share(cases.micro_batches(), self.runtime.dp_rank, self.runtime.dp_size)
        before = [p.detach().clone() for chunk in actor.chunks for p in chunk.parameters()]

        def nan_loss(log_probs: Any, entropy: Any, batch: Any) -> Any:
            return log_probs.sum() * (float("nan") if self.runtime.rank == 1 else 1.0), {}

        def inf_gradient(log_probs: Any, entropy: Any, batch: Any) -> Any:
            # sqrt has an infinite slope at 0, where its value is finite.
            return (log_probs * 0).abs().sqrt().sum() if self.runtime.rank == 1 else log_probs.sum(), {}

        for name, loss, text in (("nan loss", nan_loss, "loss"), ("nan gradient", inf_gradient, "gradient norm")):
            try:
                actor.train_step(batches, loss, cases.TEMPERATURE)
                message = "no error"
            except TrainingError as error:
                message = str(error)
            messages = self.runtime.all_gather_object(message)
            self.results[name] = all(f"the {text} of optimizer step 0 is" in m for m in messages) or messages
        after = [p.detach() for chunk in actor.chunks for p in chunk.parameters()]
        same = all(a.equal(b) for a, b in zip(before, after))
        self.results["weights unchanged"] = all(self.runtime.all_gather_object(same)) and actor.updates == 0
        finite = self.steps(actor, 1)[0]["actor/grad_norm"]
        self.results["goes on afterwards"] = 0 < finite < float("inf")

    def identical(self, name: str, layout: dict[str, Any]) -> dict[str, Any]:
        """The same layout goes on bit for bit: losses, norms and learning rates of two more steps."""
        folder = self.work / f"same-{name}"
        actor = self.actor(layout)
        self.steps(actor, 1)
        actor.save_checkpoint(folder, {})
        expected = self.steps(actor, 2)
        again = self.actor(layout)
        again.load_checkpoint(folder)
        continued = self.steps(again, 2)
        return {f"{name} continues identically": continued == expected or [continued, expected]}

    def convert(self) -> None:
        """What the tool writes is what Megatron reads, under several layouts, and the other way round."""
        from rhymemeg.parallel import convert, dist_checkpoint
        from rhymemeg.parallel.checkpoint import _sharded_state
        from rhymemeg.parallel.cpu_backend import megatron_calls

        made, exported, original = self.work / "made", self.work / "exported", self.models / MODEL
        if self.runtime.is_rank0:
            convert.to_megatron(original, made, max_file_bytes=200_000)
        self.runtime.barrier("converted")
        for name, layout in (("tp2", {TP: 2, SP: True}), ("ep2", {EP: 2}), ("pp2", {PP: 2})):
            actor = self.actor(layout)
            expected = [p.detach().clone() for chunk in actor.chunks for p in chunk.parameters()]
            with torch.no_grad(), megatron_calls():
                for chunk in actor.chunks:
                    for p in chunk.parameters():
                        p.zero_()
                state = {"model": _sharded_state(actor, is_loading=True)[0]["model"]}
                actor.chunks[0].load_state_dict(dist_checkpoint.load(state, made)["model"], strict=False)
            same = all(a.equal(b) for a, b in zip(expected, (p for c in actor.chunks for p in c.parameters())))
            self.results[f"megatron reads converted weights on {name}"] = all(self.runtime.all_gather_object(same))
            actor.save_checkpoint(self.work / f"unchanged {name}", {})
            if self.runtime.is_rank0:
                convert.to_hf(self.work / f"unchanged {name}", exported, model=original)
                a, b = (load_file(folder / "model.safetensors") for folder in (exported, original))
                back = a.keys() == b.keys() and all(a[k].equal(b[k]) for k in a)
                self.results[f"hugging face weights from a checkpoint on {name}"] = back
                shutil.rmtree(exported)

    def chain(self) -> None:
        """TP 2, then PP 2, then DP 2, each saving for the next: the losses are those of one layout all along."""
        layouts: list[dict[str, Any]] = [{TP: 2, SP: True}, {PP: 2}, {}, {DISTRIBUTED: False}]
        straight = [step["actor/loss"] for step in self.steps(self.actor({TP: 2, SP: True}), len(layouts))]
        losses: list[float] = []
        for i, layout in enumerate(layouts):
            actor = self.actor(layout)
            if i:
                actor.load_checkpoint(self.work / f"chain-{i}")
            losses.append(self.steps(actor, 1)[0]["actor/loss"])
            actor.save_checkpoint(self.work / f"chain-{i + 1}", {})
        close = all(abs(a - b) < 1e-5 for a, b in zip(losses, straight))
        self.results["tp2 -> pp2 -> dp2"] = close or [losses, straight]

    def folder(self, actor: Any) -> None:
        """The checkpoints of a run: which stay, which is loaded, what a killed save leaves."""
        from rhymemeg.config import CheckpointOptions
        from rhymemeg.parallel.checkpoint_folder import CheckpointFolder

        path, rank0 = self.work / "checkpoints", self.runtime.is_rank0
        options = CheckpointOptions(load="auto", keep_last=2, keep_every=3)
        folder = CheckpointFolder(path, options, self.runtime)
        self.results["nothing to load"] = folder.load(actor) is None
        for steps in range(1, 6):
            folder.save(actor, steps, {"step": steps}, {"mine": str(self.runtime.rank).encode()})
        names = sorted(p.name for p in path.iterdir())
        self.results["keeps the last and every third"] = names == [f"step_0000000{i}" for i in (3, 4, 5)] or names
        found = folder.load(actor)
        pieces = list(folder.load_files(found[0], "mine")) if found else []
        self.results["loads the newest"] = (found is not None and found[1] == {"step": 5}) or str(found)
        self.results["gives the pieces"] = pieces == [(0, b"0"), (1, b"1")] or str(pieces)

        if rank0:
            os.truncate(path / "step_00000005/__0_0.distcp", 10)
            # Killed while saving step 6, and, in a resumed run, between the two renames of step 4.
            (path / ".step_00000006.saving").mkdir()
            os.replace(path / "step_00000004", path / ".step_00000004.old")
        self.runtime.barrier("damage")
        folder = CheckpointFolder(path, options, self.runtime)
        found = folder.load(actor)
        self.results["passes over a damaged one"] = (found is not None and found[1] == {"step": 4}) or str(found)
        said = "step_00000005/__0_0.distcp has 10 bytes"
        self.results["says so"] = (len(folder.warnings) == 1 and said in folder.warnings[0]) or folder.warnings
        folder.begin(4)
        self.runtime.barrier("begun")
        names = sorted(p.name for p in path.iterdir())
        wanted = ["step_00000003", "step_00000004", "step_00000005.replaced"]
        self.results["tidies and sets aside"] = names == wanted or names
        named = CheckpointOptions(load=str(path / "step_00000005.replaced"))
        self.fails_naming(
            "one that is named is not passed over",
            "__0_0.distcp has 10 bytes",
            lambda: CheckpointFolder(path, named, self.runtime).load(actor),
        )

    def run(self) -> None:
        rank, saved = self.runtime.rank, self.work / "saved"
        actor = self.actor({EP: 2})
        extra = {"step": 2, "name": "é"}
        self.steps(actor, 2)
        pieces = {"both": bytes([rank] * 3)} | ({"only-0": b"\x80\x04."} if rank == 0 else {})
        actor.save_checkpoint(saved, extra, pieces)
        expected = self.steps(actor, 2)
        found = [list(read_pieces(saved, name)) for name in ("both", "only-0", "none")]
        wanted_pieces = [[(0, b"\0\0\0"), (1, b"\1\1\1")], [(0, b"\x80\x04.")], []]
        self.results["pieces"] = found == wanted_pieces or str(found)

        again = self.actor({EP: 2})
        self.results["extra state"] = again.load_checkpoint(saved) == extra
        continued = self.steps(again, 2)
        self.results["continues identically"] = continued == expected or [continued, expected]

        self.results |= self.identical("tp2", {TP: 2, SP: True}) | self.identical("pp2", {PP: 2})
        self.chain()
        self.convert()

        for name, layout in (("tp2", {TP: 2, SP: True}), ("pp2", {PP: 2}), ("dp2", {})):
            other = self.actor(layout)
            other.load_checkpoint(saved)
            losses = [step["actor/loss"] for step in self.steps(other, 2)]
            wanted = [step["actor/loss"] for step in expected]
            close = all(abs(a - b) < 1e-5 for a, b in zip(losses, wanted))
            self.results[f"loads on {name}"] = close or [losses, wanted]

        plain = self.actor({})
        self.folder(plain)
        self.fails_naming("missing", "nowhere does not exist", lambda: plain.load_checkpoint(self.work / "nowhere"))
        broken = self.copy(saved, "corrupt")
        if rank == 0:
            with (broken / "__1_0.distcp").open("r+b") as stream:
                stream.seek(1000)
                stream.write(b"\xff\x00\xff\x00")
        self.fails_naming("corrupt", "__1_0.distcp is corrupt", lambda: plain.load_checkpoint(broken))
        cut = self.copy(saved, "cut")
        if rank == 0:
            os.truncate(cut / "__0_0.distcp", 100)
        self.fails_naming("cut short", "__0_0.distcp has 100 bytes", lambda: plain.load_checkpoint(cut))
        lacking = self.copy(saved, "lacking")
        if rank == 0:
            (lacking / "manifest.json").unlink()
        self.fails_naming("no manifest", "manifest.json is missing", lambda: plain.load_checkpoint(lacking))

        changed = self.copy(saved, "changed piece")
        if rank == 0:
            (changed / "piece_1.both").write_bytes(b"\1\1\2")
        self.fails_naming("changed piece", "piece_1.both is corrupt", lambda: plain.load_checkpoint(changed))
        self.fails_naming("read changed piece", "piece_1.both is corrupt", lambda: list(read_pieces(changed, "both")))
        bad = {"../x": b""} if rank == 1 else {}
        self.fails_naming(
            "piece with a path", "'../x' is not a name", lambda: plain.save_checkpoint(self.work / "bad", {}, bad)
        )

        other = self.copy(saved, "other model")
        self.forge(other, "state.json", lambda text: text.replace(b'"num_experts": 4', b'"num_experts": 8'))
        self.fails_naming("another model", "num_experts is 8, not 4", lambda: plain.load_checkpoint(other))

        trace = self.work / "attacked"
        for name in (".metadata", "common.pt"):
            attacked = self.copy(saved, f"attack{name}")
            self.forge(attacked, name, lambda _: pickle.dumps(Attack(trace)))
            errors = self.error(lambda folder=attacked: plain.load_checkpoint(folder))  # type: ignore[misc]
            refused = all(e != "no error" for e in errors)
            self.results[f"refuses code in {name}"] = (refused and not trace.exists()) or errors

        self.not_finite()

        # A disk that fills up: this rank's files may not grow beyond a few kilobytes.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        actor = self.actor({EP: 2})
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        self.fails_naming("full disk", "rank 1: [Errno 27] File too large", lambda: actor.save_checkpoint(saved, {}))
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        self.results["previous checkpoint is whole"] = actor.load_checkpoint(saved) == extra
        self.results["nothing left aside"] = sorted(p.name for p in self.work.glob(".*")) == []
        actor.save_checkpoint(saved, {"step": 4})
        self.results["replaces"] = actor.load_checkpoint(saved) == {"step": 4}


def main() -> None:
    config = make_config({})
    runtime = init_runtime(config.run, config.parallel, seed=1)
    checks = Checks(Path(sys.argv[1]), Path(sys.argv[2]), runtime)
    checks.run()
    if runtime.is_rank0:
        (checks.work / "results.json").write_text(json.dumps(checks.results))
    shutdown()


if __name__ == "__main__":
    main()
