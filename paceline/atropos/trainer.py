"""The training loop: pull a batch, train on it, publish, and report metrics. Its progress is on disk."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline import errors
from paceline.atropos.api import AtroposApi
from paceline.atropos.groups import Bounds, ScoredSequence, TrainingBatch, logprob_metrics, make_batch, micro_batches
from paceline.atropos.options import Options
from paceline.client import ServiceClient, TrainingClient
from paceline.sampler.v1 import sampler_service_pb2 as sampler_pb
from paceline.types import (
    AdafactorParams,
    Adam8bitParams,
    AdamCpuParams,
    AdamParams,
    ForwardBackwardOutput,
    OptimizerParams,
)

_SERVER_SECONDS = 60.0
_ADAMW = {"beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
"""torch's defaults, which the example trainer uses."""
_MAX_NORM = 1.0
_MOST_PROBLEMS = 5
"""Reasons that are said for each batch."""


@dataclass(frozen=True, slots=True)
class PulledBatch:
    """A batch pulled from the Atropos API server."""

    step: int
    """The step that trains on it, from 1."""
    batch_size: int
    seq_len: int
    clip_eps: float
    """The options with which it is trained; a restart with others keeps them."""
    groups: list[Any]
    was_refused: bool = False
    """Whether the trainer has refused a part of it. What is refused again is left out."""


class Progress:
    """The files from which a restart resumes: the run, and a pulled batch that may not be trained yet.

    A batch is written to disk before it is trained, because the Atropos API server no longer has it. Attaching to the
    run waits for what an earlier process sent, so that its step tells whether the batch was trained. If it was not, the
    gradient of an earlier process is discarded, and the whole batch is trained.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._run, self._batch = directory / "run.json", directory / "batch.json"

    def run_id(self) -> str:
        """Return the id of the started run; empty if there is none."""
        found: str = json.loads(self._run.read_text())["run_id"] if self._run.exists() else ""
        return found

    def begin(self, run_id: str) -> None:
        """Record a new run."""
        _write(self._run, {"run_id": run_id})
        self._batch.unlink(missing_ok=True)

    def pulled(self) -> PulledBatch | None:
        """Return the batch that was pulled and is not done, if any."""
        return PulledBatch(**json.loads(self._batch.read_text())) if self._batch.exists() else None

    def pull(self, batch: PulledBatch) -> None:
        """Store a batch until `done`."""
        _write(self._batch, {name: getattr(batch, name) for name in PulledBatch.__dataclass_fields__})

    def done(self) -> None:
        """Delete the stored batch."""
        self._batch.unlink(missing_ok=True)


def _write(path: Path, content: object) -> None:
    staging = path.with_suffix(".new")
    with os.fdopen(os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    staging.replace(path)


class AtroposTrainer:
    """Trains one run."""

    def __init__(self, options: Options, service: ServiceClient, say: Callable[[str], None]) -> None:
        self.options, self._service, self._say = options, service, say
        self.api = AtroposApi(options.atropos_url)
        self._progress = Progress(options.directory)
        self.log = Log(options)
        self._bounds: Bounds | None = None
        """What the model takes; None until it is known."""
        self._skipped = Counter[str]()
        """What was left out of batches since the last step, by metric."""

    def run(self) -> None:
        """Train until `training_steps`. Raises PacelineError, ConnectionError."""
        options = self.options
        self._check_bridge()
        self.api.wait(_SERVER_SECONDS, self._say)
        training = self._training_client()
        run = self._service.get_run(training.run_id)
        step, self._bounds = run.step, self._bounds_of(run.base_model)
        name = f"/weights/{options.run_name}/v1"
        self._say(f"run {training.run_id} at step {step}; environments sample from {name} of the gateway's HTTP port")
        self.api.register(
            wandb_group=options.wandb_group,
            wandb_project=options.wandb_project,
            batch_size=options.batch_size * options.gradient_accumulation_steps,
            max_token_len=options.seq_len,
            checkpoint_dir=str(options.save_path or ""),
            save_checkpoint_interval=options.checkpoint_interval or options.training_steps,
            starting_step=step,
            num_steps=options.training_steps,
        )
        while step < options.training_steps or self._progress.pulled():
            step = self.step(training, step)
        self._finish(training)

    def step(self, training: TrainingClient, step: int) -> int:
        """Train on the stored batch, or pull the next one; return the run's step afterwards."""
        start = time.perf_counter()
        pulled = self._progress.pulled() or self._pull(step)
        fetched = time.perf_counter()
        batch = make_batch(pulled.groups, pulled.seq_len, self._bounds)
        self._report(batch)
        if not batch.sequences:  # stored for a model that takes more
            self._say(f"step {pulled.step}: nothing of the stored batch can be trained on, it is dropped")
            self._progress.done()
            return step
        metrics = self.train(training, pulled, batch) if step < pulled.step else {}
        metrics |= self.publish(training, pulled.step)
        self._progress.done()
        for name, count in self._skipped.items():
            metrics[name] = metrics.get(name, 0.0) + count
        self._skipped.clear()
        metrics |= {"time/fetch": fetched - start, "time/step": time.perf_counter() - fetched}
        self.log.add(pulled.step, metrics)
        self._say(
            f"step {pulled.step}: loss {metrics.get('loss', float('nan')):.4f}, "
            f"alignment {metrics.get('alignment/diff_abs_mean', float('nan')):.2g}, {metrics['time/step']:.2f} s"
        )
        return self._service.get_run(training.run_id).step

    def _pull(self, step: int) -> PulledBatch:
        """Wait for a batch of which something can be trained on, and store it."""
        options = self.options
        while True:
            groups = self.api.next_batch(step, self._say)
            batch = make_batch(groups, options.seq_len, self._bounds)
            if batch.sequences:
                break
            # It is not stored: a batch that can never be trained on would end every restart.
            self._report(batch)
            self._say(f"step {step + 1}: nothing of the batch can be trained on, it is dropped; waiting for the next")
        split = (options.batch_size, options.seq_len, options.clip_eps)
        pulled = PulledBatch(step + 1, *split, groups)
        self._progress.pull(pulled)
        return pulled

    def _report(self, batch: TrainingBatch) -> None:
        """Say what of a batch is left out, and count it."""
        self._skipped["skipped_sequences"] += batch.skipped
        self._skipped["skipped_groups"] += batch.skipped_groups
        for problem, count in Counter(batch.problems).most_common(_MOST_PROBLEMS):
            self._say(f"left out{f' {count} times' if count > 1 else ''}: {problem}")
        if (more := len(batch.problems) - _MOST_PROBLEMS) > 0:
            self._say(f"left out for {more} more reasons")

    def _bounds_of(self, base_model: str) -> Bounds | None:
        """Return what a served model takes, and say if it is less than --seq-len."""
        for supported in self._service.get_server_capabilities().supported_models:
            model = supported.model
            if model.name == base_model:
                if self.options.seq_len > model.max_context_length:
                    self._say(f"--seq-len is {self.options.seq_len}; the model takes {model.max_context_length}")
                return Bounds(model.vocab_size, model.max_context_length)
        return None

    def train(self, training: TrainingClient, pulled: PulledBatch, batch: TrainingBatch) -> dict[str, float]:
        """Train on a whole batch and take the step. Raises the error of a part that is refused for the first time."""
        calls = micro_batches(batch.sequences, pulled.batch_size)
        config = {"clip_low_threshold": 1.0 - pulled.clip_eps, "clip_high_threshold": 1.0 + pulled.clip_eps}
        discarded = training.discard_gradient()
        futures = [training.forward_backward([one.datum for one in call], "grpo", config) for call in calls]
        discarded.result()
        # The step waits for all answers, since a refused forward_backward adds nothing to the gradient.
        outputs: list[ForwardBackwardOutput] = []
        sequences: list[ScoredSequence] = []
        failures: list[errors.PacelineError] = []
        metrics: dict[str, float] = {"skipped_sequences": 0.0, "skipped_groups": 0.0}
        for call, future in zip(calls, futures, strict=True):
            try:
                outputs.append(future.result())
                sequences += call
            except errors.PacelineError as error:
                if _is_refusal(error) and pulled.was_refused:
                    metrics["skipped_sequences"] += len(call)
                    message = f"step {pulled.step}: {len(call)} sequence(s) were refused again and are left out"
                    self._say(f"{message}: {error}")
                    continue
                failures.append(error)
                if _is_refusal(error) and len(failures) == 1:
                    self._progress.pull(replace(pulled, was_refused=True))
        if failures:
            self._say(
                f"step {pulled.step}: {len(failures)} of {len(calls)} forward_backwards failed, and no step was taken. "
                "Mend the cause and start this command again: it trains on the batch, without what is refused again"
            )
            raise failures[0]
        if not outputs:
            self._say(f"step {pulled.step}: nothing of the batch was accepted, it is dropped")
            return metrics
        logprobs = [tensors["logprobs"] for output in outputs for tensors in output.loss_fn_outputs]
        metrics["loss"] = sum(output.metrics["loss:sum"] for output in outputs)
        metrics |= logprob_metrics(sequences, logprobs)
        try:
            done = training.optim_step(self._optimizer(pulled.step)).result()
        except (errors.NoGradient, errors.NonFiniteGradient) as error:  # as it would be again
            self._say(f"step {pulled.step}: the batch is dropped, {error}")
            return metrics
        return metrics | {"grad_norm": done.grad_norm, "lr": done.learning_rate, "tokens": float(done.tokens)}

    def publish(self, training: TrainingClient, step: int) -> dict[str, float]:
        """Publish a version and save a checkpoint, if due at this step."""
        start, options = time.perf_counter(), self.options
        is_last = step == options.training_steps
        if step % options.vllm_restart_interval == 0 or is_last:
            training.publish_weights(durable=True, wait_for="any").result()
        synced = time.perf_counter()
        if options.checkpoint_interval and step % options.checkpoint_interval == 0 and not is_last:
            training.save_state(f"step-{step}", overwrite=True).result()
        return {"time/sync": synced - start}

    def _finish(self, training: TrainingClient) -> None:
        training.save_state("final", overwrite=True).result()
        weights = training.save_weights_for_sampler("final", overwrite=True).result().path
        self._say(f"saved {weights}")
        if self.options.save_path is not None:
            self._say(f"downloaded to {self._service.download_checkpoint(weights, self.options.save_path / 'final')}")
        self.log.close(self._say)

    def _optimizer(self, step: int) -> OptimizerParams:
        options = self.options
        rate = options.lr * min(1.0, step / options.warmup_steps) if options.warmup_steps > 0 else options.lr
        if options.optimizer == "adafactor":
            return AdafactorParams(
                learning_rate=rate,
                scale_parameter=options.adafactor_scale_parameter,
                relative_step=options.adafactor_relative_step,
                grad_clip_norm=_MAX_NORM,
            )
        kinds = {"adamw": AdamParams, "adamw_8bit": Adam8bitParams, "adamw_cpu": AdamCpuParams}
        return kinds[options.optimizer](learning_rate=rate, grad_clip_norm=_MAX_NORM, **_ADAMW)

    def _training_client(self) -> TrainingClient:
        """Resume the recorded run, or create one and publish its first version for environments to sample from."""
        run_id, options = self._progress.run_id(), self.options
        if run_id:
            name = self._service.get_run(run_id).user_metadata.get("name", "")
            if name != options.run_name:
                message = (
                    f"{options.directory} is of run {run_id}, whose name is {name}; give that name or another --state"
                )
                raise errors.InvalidArgument(message, field="--run-name")
            return self._service.get_training_client(run_id)
        metadata, model = {"name": options.run_name, "by": "paceline atropos"}, self._model()
        if options.is_lora:
            training = self._service.create_lora_training_client(
                model,
                options.lora_r,
                alpha=options.lora_alpha,
                dropout=options.lora_dropout,
                layers=options.lora_layer_indices,
                target_modules=options.lora_target_modules,
                user_metadata=metadata,
            )
        else:
            training = self._service.create_full_training_client(model, user_metadata=metadata)
        training.publish_weights(durable=True, wait_for="any").result()
        self._progress.begin(training.run_id)
        return training

    def _model(self) -> str:
        """Return the served name of the requested model. Raises ModelNotFound."""
        served = [supported.model.name for supported in self._service.get_server_capabilities().supported_models]
        for name in served:
            if self.options.model.rstrip("/").rpartition("/")[2] in {"", name}:
                return name
        raise errors.ModelNotFound(f"no such base model; {', '.join(served)} is served", field="--model")

    def _check_bridge(self) -> None:
        """Check that the sampler's bridge fits `--weight-bridge-mode`. Raises Unsupported."""
        transport = self._service.transport
        info = transport.query(transport.sampler.GetServerInfo, sampler_pb.GetServerInfoRequest()).result()
        wanted = self.options.bridge
        if wanted and info.bridge != wanted:
            mode = self.options.weight_bridge_mode
            message = f"{mode} needs a sampler with bridge {wanted}; this one has {info.bridge}. Start it with "
            raise errors.Unsupported(message + f"`paceline up --bridge {wanted}`", field="--weight-bridge-mode")


def _is_refusal(error: errors.PacelineError) -> bool:
    """Return whether the trainer refused a part of a batch for what is in it."""
    kinds = (errors.InvalidArgument, errors.Exhausted, errors.Internal, errors.PoisonedCommand)
    return error.fate is errors.Fate.ANSWERED and isinstance(error, kinds)


class Log:
    """Writes metrics to a file and Weights & Biases, and a summary at the end."""

    def __init__(self, options: Options) -> None:
        self._is_benchmark = options.benchmark
        self._times: dict[str, list[float]] = {"time/step": [], "time/sync": [], "time/fetch": []}
        self._file = None
        if options.log_dir is not None:
            options.log_dir.mkdir(parents=True, exist_ok=True)
            self._file = (options.log_dir / "metrics.jsonl").open("a")
        self._wandb: Any = _wandb(options) if options.use_wandb else None
        self._start = time.perf_counter()

    def add(self, step: int, metrics: dict[str, float]) -> None:
        """Log the metrics of a step."""
        for name, values in self._times.items():
            values.append(metrics.get(name, 0.0))
        if self._file is not None:
            self._file.write(json.dumps({"step": step, **metrics}) + "\n")
            self._file.flush()
        if self._wandb is not None:
            self._wandb.log({f"train/{name}": value for name, value in metrics.items()}, step=step)

    def close(self, say: Callable[[str], None]) -> None:
        """Close the outputs, and print the summary if requested."""
        if self._file is not None:
            self._file.close()
        if self._wandb is not None:
            self._wandb.finish()
        if self._is_benchmark:
            steps = len(self._times["time/step"])
            say(f"benchmark: {time.perf_counter() - self._start:.1f} s in all, {steps} steps")
            for name, values in self._times.items():
                average = sum(values) / max(1, steps)
                say(f"benchmark: {name.removeprefix('time/')} {average:.3f} s on average, {sum(values):.1f} s in all")


def _wandb(options: Options) -> Any:
    try:
        import wandb  # noqa: PLC0415
    except ImportError as error:
        raise errors.Unsupported("Weights & Biases is not installed: pip install wandb", field="--use-wandb") from error
    return wandb.init(project=options.wandb_project or None, group=options.wandb_group or None)


def say(line: str) -> None:
    """Print a line to standard error."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
