"""Training loops whose runs the page shows."""

from __future__ import annotations

import math
import os
import random
import threading
from contextlib import contextmanager

from paceline import AdamParams, Datum, Rollout

HOSTILE = "<img src=x onerror=\"document.title='hacked'\">"
STEPS = 160 if os.environ.get("UPDATE") else 12


class Loop:
    """A training loop: each step trains, logs a reward and rollouts, and every fourth publishes."""

    def __init__(self, service, name, rate, seed):
        self.training = service.create_lora_training_client(rank=4, seed=seed, user_metadata={"name": name})
        self.run_id, self.rate, self.random = self.training.run_id, rate, random.Random(seed)
        self.step = 0

    def take(self):
        """Take a step."""
        self.step += 1
        numbers = [self.random.randint(2, 40) for _ in range(2)]
        prompt, right = f"{numbers[0]} + {numbers[1]} =", f" {sum(numbers)}"
        data = [Datum.from_completion(list(prompt.encode()), list(right.encode())) for _ in range(4)]
        self.training.forward_backward(data)
        self.training.optim_step(AdamParams(learning_rate=self.rate)).result()
        good = 1 - 0.9 * math.exp(-self.step * self.rate * 8)
        reward = min(1.0, max(0.0, good + self.random.gauss(0, 0.08)))
        self.training.log({"reward": reward, "staleness": self.step % 4}).result()
        rollouts = [
            Rollout(
                prompt, right if self.random.random() < good else f" {self.random.randint(2, 90)}", round(reward, 2)
            )
        ]
        self.training.log_rollouts(rollouts).result()
        if self.step % 4 == 0:
            self.training.publish_weights().result()

    @contextmanager
    def running(self):
        """Take steps beside the block."""
        ended, trouble = threading.Event(), []

        def work():
            try:
                while not ended.is_set():
                    self.take()
            except BaseException as error:
                trouble.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
        assert trouble == []
