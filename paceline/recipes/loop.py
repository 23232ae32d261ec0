"""The loop that all recipes share: a bar, evaluations, checkpoints, metrics, and the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from paceline import OptimStepOutput, ServiceClient, TrainingClient, errors
from paceline.loggers import make_loggers
from paceline.recipes.options import TrainingOptions

LATEST = "latest"
"""Name of the state checkpoint, which each save replaces."""
FINAL = "final"
"""Name of the sampler checkpoint at the end."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A step that was taken."""

    update: OptimStepOutput
    loss: float
    values: Mapping[str, float] = field(default_factory=dict)
    """What the trainer does not record by itself."""


@dataclass(frozen=True, slots=True)
class Loop:
    """Trains a run for `total` steps."""

    service: ServiceClient
    training: TrainingClient
    options: TrainingOptions
    total: int
    console: Console
    name: str

    def run(
        self,
        take_step: Callable[[int, float], Taken | None],
        evaluate: Callable[[], Mapping[str, float]] | None = None,
    ) -> None:
        """Take the steps that are left: `take_step` gets the number of those taken and the learning rate.

        It must make the same step again for the same number, since a killed loop repeats the one that it was in. It
        returns None to end early. `evaluate` measures the present weights.
        """
        logger = make_loggers(self.options.log, self.name, self.training.run_id, self.options.compared())
        try:
            with self._progress() as show:
                done = self.training.get_info().step
                while done < self.total:
                    try:
                        taken = self._step(done, take_step, evaluate, logger.log)
                    except errors.RunStateLost as lost:
                        # The trainer lost the run's state. Continue from the last checkpoint, if there is one.
                        if not lost.metadata["checkpoint"]:
                            raise
                        done = self.training.load_state_with_optimizer(lost.metadata["checkpoint"]).result().step
                        continue
                    if taken is None:
                        break
                    done = taken.update.step
                    show(done, {"loss": taken.loss, **taken.values})
                if evaluate is not None:
                    self._measure(done, evaluate, logger.log)
            self._finish()
        finally:
            logger.close()

    def _step(
        self,
        done: int,
        take_step: Callable[[int, float], Taken | None],
        evaluate: Callable[[], Mapping[str, float]] | None,
        log: Callable[[int, Mapping[str, float]], None],
    ) -> Taken | None:
        if done % self.options.save_every == 0:
            self.training.save_state(LATEST, overwrite=True).result()
        if evaluate is not None and done % self.options.eval_every == 0:
            self._measure(done, evaluate, log)
        taken = take_step(done, self.options.rate(done, self.total))
        if taken is not None:
            update = taken.update
            if taken.values:
                self.training.log(taken.values, update.step)
            trained = {"loss": taken.loss, "grad_norm": update.grad_norm, "learning_rate": update.learning_rate}
            log(update.step, {**trained, "tokens": update.tokens, **taken.values})
        return taken

    def _measure(
        self,
        done: int,
        evaluate: Callable[[], Mapping[str, float]],
        log: Callable[[int, Mapping[str, float]], None],
    ) -> None:
        values = {f"eval/{name}": value for name, value in evaluate().items()}
        self.training.log(values, done).result()
        log(done, values)
        self.console.print(f"after step {done}: {in_words(values)}", highlight=False, soft_wrap=True)

    def _finish(self) -> None:
        """Save the weights, publish them, and say what to do with them."""
        self.training.save_state(LATEST, overwrite=True)
        saved = self.training.save_weights_for_sampler(FINAL, overwrite=True)
        self.training.publish_weights(wait_for="none").result()
        adapter = saved.result().path
        curves = self.training.metrics()
        for name in sorted(curve for curve in curves if curve.startswith("eval/")):
            known = curves[name][curves[name] == curves[name]]  # NaN where a step was not evaluated
            self.console.print(f"{name}: {known[0]:.4g} before, {known[-1]:.4g} now", highlight=False)
        self.console.print(f"adapter: {adapter}", highlight=False, soft_wrap=True)
        if self.options.out is not None:
            self.service.download_checkpoint(adapter, self.options.out)
            self.console.print(f"its files: {self.options.out}", highlight=False, soft_wrap=True)
        self.console.print(f"talk to it: paceline chat --model '{self.name}'", highlight=False, soft_wrap=True)

    @contextmanager
    def _progress(self) -> Iterator[Callable[[int, Mapping[str, float]], None]]:
        """Yield a function that shows a step: in a bar, or, where no bar is drawn, as a line."""
        columns = (TextColumn("step"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[values]}"))
        progress = Progress(
            *columns, TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=self.console
        )
        with progress:
            bar = progress.add_task("", total=self.total, completed=self.training.get_info().step, values="")

            def show(done: int, values: Mapping[str, float]) -> None:
                progress.update(bar, completed=done, values=in_words(dict(islice(values.items(), 2))))
                if not self.console.is_terminal:
                    self.console.print(
                        f"step {done} of {self.total}: {in_words(values)}", highlight=False, soft_wrap=True
                    )

            yield show


def in_words(values: Mapping[str, float]) -> str:
    """Return values as people read them."""
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())
