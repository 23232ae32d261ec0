"""Every call of Tinker's SDK against a running gateway, in an environment with the SDK and none of our code.

python tinker_calls.py        prints a line of JSON: the outcome of each call ("works", or how it was refused)
TINKER_BASE_URL and TINKER_API_KEY give the gateway and the key; MODEL names the base model.
"""

import inspect
import json
import os
import sys
import tempfile
import traceback
import urllib.request
import warnings
from pathlib import Path

warnings.simplefilter("ignore")

import tinker  # noqa: E402
from tinker import types  # noqa: E402

MODEL = os.environ["MODEL"]
PROMPT = [5, 6, 7, 8]
OUTCOMES: dict[str, str] = {}


class Absent(Exception):
    """The release has no such call."""


def need(holder, *names):
    """Return a method under the first of these names that exists. Raises Absent."""
    for name in names:
        if hasattr(holder, name):
            return getattr(holder, name)
    raise Absent(names[0])


def done(answer):
    """Return a call's answer, waiting for its result if it is a future."""
    return answer.result() if hasattr(answer, "result") else answer


def call(name):
    """Run the decorated function at once and record its outcome under the name of the call that it tests."""

    def run(function):
        try:
            OUTCOMES[name] = function() or "works"
        except Absent:
            OUTCOMES[name] = "absent"
        except Exception as error:
            if os.environ.get("VERBOSE"):
                traceback.print_exc()
            OUTCOMES[name] = f"fails: {type(error).__name__}: {str(error)[:300]}"
        return function

    return run


def refused(function, *words):
    """Return the error that a call is refused with. Fails if the call succeeds or the error lacks one of `words`."""
    try:
        answer = done(function())
    except Absent:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        missing = [word for word in words if word not in text]
        if missing:
            raise AssertionError(f"{missing} not in {text}") from error
        return f"refused: {type(error).__name__}, {words[0]}"
    raise AssertionError(f"was not refused: {answer!r}"[:200])


def datum(tokens=(5, 6, 7, 8, 9), **inputs):
    n = len(tokens) - 1
    fields = {"target_tokens": list(tokens[1:]), "weights": [1.0] * n} | inputs
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={
            name: types.TensorData(
                data=values, dtype="int64" if name == "target_tokens" else "float32", shape=[len(values)]
            )
            for name, values in fields.items()
        },
    )


def rl_datum(tokens=(5, 6, 7, 8, 9)):
    n = len(tokens) - 1
    made = datum(tokens, logprobs=[-4.0] * n, advantages=[1.0] * n)
    del made.loss_fn_inputs["weights"]
    return made


def main():  # noqa: PLR0915
    service = tinker.ServiceClient(user_metadata={"who": "test"}, project_id="p")
    training = done(service.create_lora_training_client(base_model=MODEL, rank=4, seed=3, train_unembed=False))
    OUTCOMES["ServiceClient.create_lora_training_client"] = "works"
    losses = []

    @call("ServiceClient.get_server_capabilities")
    def _():
        models = service.get_server_capabilities().supported_models
        assert MODEL in {model.model_name for model in models}

    @call("TrainingClient.get_info")
    def _():
        info = training.get_info()
        assert (info.model_data.model_name, info.lora_rank) == (MODEL, 4), info

    @call("TrainingClient.forward")
    def _():
        output = training.forward([datum()], "cross_entropy").result()
        logprobs = output.loss_fn_outputs[0]["logprobs"].data
        assert len(logprobs) == 4
        assert abs(output.metrics["loss:sum"] + sum(logprobs)) < 1e-3, output.metrics

    @call("TrainingClient.forward_backward")
    def _():
        for _ in range(3):
            forward_backward = training.forward_backward([datum(), datum((5, 6, 7))], "cross_entropy")
            step = training.optim_step(types.AdamParams(learning_rate=1e-2))
            losses.append(forward_backward.result().metrics["loss:sum"])
            step.result()
        assert losses[0] > losses[-1], losses

    @call("TrainingClient.optim_step")
    def _():
        training.forward_backward([datum()], "cross_entropy").result()
        output = training.optim_step(
            types.AdamParams(learning_rate=1e-3, beta1=0.8, beta2=0.9, eps=1e-8, grad_clip_norm=1.0)
        ).result()
        assert output.metrics["optim/learning_rate"] == 1e-3, output.metrics

    for loss in ("importance_sampling", "ppo", "cispo", "dro"):

        @call(f"forward_backward, {loss}")
        def _(loss=loss):
            config = {"beta": 0.05} if loss == "dro" else None
            output = done(training.forward_backward([rl_datum()], loss, config))
            assert "loss:sum" in output.metrics

    @call("forward_backward, stable_reinforce")
    def _():
        return refused(lambda: training.forward_backward([rl_datum()], "stable_reinforce"), "UNKNOWN_LOSS", "cispo")

    @call("TrainingClient.forward_backward_custom")
    def _():
        import torch

        def loss(data, logprobs):
            value = -torch.cat([one.flatten() for one in logprobs]).sum()
            return value, {"mine": float(value)}

        output = done(training.forward_backward_custom([datum(), datum((5, 6, 7))], loss))
        assert output.metrics["mine"] > 0, output.metrics
        done(training.optim_step(types.AdamParams()))

    paths = {}

    @call("TrainingClient.save_state")
    def _():
        paths["state"] = training.save_state("one").result().path
        assert paths["state"].startswith("tinker://")

    @call("TrainingClient.save_state, ttl_seconds")
    def _():
        training.save_state("short", ttl_seconds=7200).result()

    @call("save_state of a name that exists")
    def _():
        return refused(lambda: training.save_state("one"), "CHECKPOINT_EXISTS")

    @call("TrainingClient.save_weights_for_sampler")
    def _():
        paths["sampler"] = training.save_weights_for_sampler("one").result().path

    @call("TrainingClient.load_state")
    def _():
        done(training.load_state(paths["state"]))

    @call("TrainingClient.load_state_with_optimizer")
    def _():
        done(need(training, "load_state_with_optimizer")(paths["state"]))

    @call("ServiceClient.create_training_client_from_state")
    def _():
        copy = done(service.create_training_client_from_state(paths["state"]))
        again = done(copy.forward([datum()], "cross_entropy")).metrics["loss:sum"]
        here = done(training.forward([datum()], "cross_entropy")).metrics["loss:sum"]
        assert abs(again - here) < 1e-4, (again, here)
        done(copy.forward_backward([datum()], "cross_entropy"))
        done(copy.optim_step(types.AdamParams()))

    @call("ServiceClient.create_training_client_from_state_with_optimizer")
    def _():
        copy = done(need(service, "create_training_client_from_state_with_optimizer")(paths["state"]))
        done(copy.forward_backward([datum()], "cross_entropy"))

    sampler = []

    @call("TrainingClient.save_weights_and_get_sampling_client")
    def _():
        sampler.append(done(training.save_weights_and_get_sampling_client()))

    @call("ServiceClient.create_sampling_client, base_model")
    def _():
        base = done(service.create_sampling_client(base_model=MODEL))
        answer = done(base.sample(types.ModelInput.from_ints(PROMPT), 1, types.SamplingParams(max_tokens=3)))
        assert len(answer.sequences[0].tokens) == 3 or answer.sequences[0].stop_reason == "stop"

    @call("ServiceClient.create_sampling_client, model_path")
    def _():
        client = done(service.create_sampling_client(model_path=paths["sampler"]))
        answer = done(client.sample(types.ModelInput.from_ints(PROMPT), 1, types.SamplingParams(max_tokens=3)))
        assert answer.sequences

    @call("SamplingClient.sample")
    def _():
        params = types.SamplingParams(max_tokens=6, temperature=0.7, seed=4, top_k=20, top_p=0.9)
        first, second = (done(sampler[0].sample(types.ModelInput.from_ints(PROMPT), 3, params)) for _ in range(2))
        assert [list(one.tokens) for one in first.sequences] == [list(one.tokens) for one in second.sequences]
        assert len(first.sequences) == 3
        assert all(len(one.tokens) == len(one.logprobs) for one in first.sequences)

    @call("SamplingClient.sample, stop")
    def _():
        greedy = types.SamplingParams(max_tokens=4, temperature=0.0)
        free = done(sampler[0].sample(types.ModelInput.from_ints(PROMPT), 1, greedy)).sequences[0].tokens
        stopping = types.SamplingParams(max_tokens=4, temperature=0.0, stop=[int(free[1])])
        found = done(sampler[0].sample(types.ModelInput.from_ints(PROMPT), 1, stopping)).sequences[0]
        assert found.stop_reason == "stop", found
        assert list(found.tokens)[-1] == free[1]

    @call("SamplingClient.sample, prompt and top-k logprobs")
    def _():
        answer = done(
            sampler[0].sample(
                types.ModelInput.from_ints(PROMPT),
                1,
                types.SamplingParams(max_tokens=2),
                include_prompt_logprobs=True,
                topk_prompt_logprobs=3,
            )
        )
        assert len(answer.prompt_logprobs) == 4
        assert answer.prompt_logprobs[0] is None
        assert len(answer.topk_prompt_logprobs) == 4
        assert len(answer.topk_prompt_logprobs[1]) == 3

    @call("SamplingClient.compute_logprobs")
    def _():
        logprobs = done(sampler[0].compute_logprobs(types.ModelInput.from_ints([5, 6, 7, 8, 9])))
        trained = done(training.forward([datum()], "cross_entropy")).loss_fn_outputs[0]["logprobs"].data
        assert max(abs(a - b) for a, b in zip(logprobs[1:], trained, strict=True)) < 1e-3, (logprobs, trained)

    @call("SamplingClient.sample, topk_sample_logprobs")
    def _():
        if "topk_sample_logprobs" not in inspect.signature(sampler[0].sample).parameters:
            raise Absent("topk_sample_logprobs")
        params = types.SamplingParams(max_tokens=2)
        answer = done(sampler[0].sample(types.ModelInput.from_ints(PROMPT), 1, params, topk_sample_logprobs=4))
        assert answer.sequences[0].topk_logprobs is not None

    @call("SamplingClient.sample, prompt_logprobs_last_n")
    def _():
        if "prompt_logprobs_last_n" not in inspect.signature(sampler[0].sample).parameters:
            raise Absent("prompt_logprobs_last_n")
        answer = done(
            sampler[0].sample(
                types.ModelInput.from_ints(PROMPT),
                1,
                types.SamplingParams(max_tokens=1),
                include_prompt_logprobs=True,
                prompt_logprobs_last_n=2,
            )
        )
        assert [one is None for one in answer.prompt_logprobs] == [True, True, False, False]

    @call("SamplingClient.sample, prompt_alt_tokens_k")
    def _():
        if "prompt_alt_tokens_k" not in inspect.signature(sampler[0].sample).parameters:
            raise Absent("prompt_alt_tokens_k")
        params = types.SamplingParams(max_tokens=1)
        prompt = types.ModelInput.from_ints(PROMPT)
        return refused(lambda: sampler[0].sample(prompt, 1, params, prompt_alt_tokens_k=2), "UNIMPLEMENTED")

    @call("SamplingClient.get_base_model")
    def _():
        assert need(sampler[0], "get_base_model")() == MODEL

    @call("TrainingClient.get_tokenizer")
    def _():
        assert training.get_tokenizer().decode([1])

    rest = service.create_rest_client() if hasattr(service, "create_rest_client") else tinker.RestClient()
    run_id = training.model_id

    @call("RestClient.get_training_run")
    def _():
        run = done(rest.get_training_run(run_id))
        assert (run.base_model, run.lora_rank) == (MODEL, 4)
        assert run.last_checkpoint is not None

    @call("RestClient.list_training_runs")
    def _():
        assert run_id in {run.training_run_id for run in done(rest.list_training_runs()).training_runs}

    @call("RestClient.list_checkpoints")
    def _():
        found = {one.tinker_path for one in done(rest.list_checkpoints(run_id)).checkpoints}
        assert {paths["state"], paths["sampler"]} <= found

    @call("RestClient.list_user_checkpoints")
    def _():
        found = {one.tinker_path for one in done(need(rest, "list_user_checkpoints")()).checkpoints}
        assert paths["state"] in found

    @call("RestClient.get_weights_info_by_tinker_path")
    def _():
        info = done(need(rest, "get_weights_info_by_tinker_path")(paths["state"]))
        assert (info.base_model, info.lora_rank) == (MODEL, 4)

    @call("RestClient.set_checkpoint_ttl_from_tinker_path")
    def _():
        done(need(rest, "set_checkpoint_ttl_from_tinker_path")(paths["state"], 7200))
        found = {one.tinker_path: one for one in done(rest.list_checkpoints(run_id)).checkpoints}
        assert found[paths["state"]].expires_at is not None
        done(rest.set_checkpoint_ttl_from_tinker_path(paths["state"], None))

    @call("RestClient.list_sessions")
    def _():
        session = done(need(rest, "list_sessions")()).sessions[0]
        found = done(rest.get_session(session))
        assert run_id in found.training_run_ids

    @call("RestClient.get_sampler")
    def _():
        session = done(need(rest, "list_sessions")()).sessions[0]
        sampler_id = done(rest.get_session(session)).sampler_ids[0]
        assert done(need(rest, "get_sampler")(sampler_id)).base_model == MODEL

    @call("RestClient.get_checkpoint_archive_url_from_tinker_path")
    def _():
        address = done(need(rest, "get_checkpoint_archive_url_from_tinker_path")(paths["sampler"])).url
        import io
        import tarfile

        with urllib.request.urlopen(address) as answer, tarfile.open(fileobj=io.BytesIO(answer.read())) as archive:
            assert "adapter_model.safetensors" in archive.getnames()

    @call("TrainingClient.save_weights_external")
    def _():
        paths["external"] = done(need(training, "save_weights_external")("out")).path

    @call("RestClient.get_external_weights_urls")
    def _():
        names = [name for name in dir(rest) if "external_weights" in name and not name.endswith("_async")]
        method = need(rest, *names) if names else need(rest, "get_external_weights_urls")
        urls = done(method(paths["external"])).urls
        with tempfile.TemporaryDirectory() as folder:
            for name, address in urls.items():
                urllib.request.urlretrieve(address, Path(folder) / name)
            assert (Path(folder) / "adapter_model.safetensors").stat().st_size > 1000

    @call("save_weights_external, age_encryption_recipients")
    def _():
        save = need(training, "save_weights_external")
        if "age_encryption_recipients" not in inspect.signature(save).parameters:
            raise Absent("age_encryption_recipients")
        key = "age1ql3z7hjy54pw3hyww5ayyfg7zqgvc7w3j2elw8zmrj2kg5sfn9aqmcac8p"
        return refused(lambda: save("sealed", age_encryption_recipients=[key]), "UNIMPLEMENTED")

    @call("RestClient.publish_checkpoint_from_tinker_path")
    def _():
        publish = need(rest, "publish_checkpoint_from_tinker_path")
        return refused(lambda: publish(paths["state"]), "not served here")

    @call("ServiceClient.copy_weights")
    def _():
        copy = need(service, "copy_weights")
        return refused(lambda: copy(paths["state"]), "not served here")

    @call("RestClient.delete_checkpoint_from_tinker_path")
    def _():
        done(need(rest, "delete_checkpoint_from_tinker_path")(paths["state"]))
        found = {one.tinker_path for one in done(rest.list_checkpoints(run_id)).checkpoints}
        assert paths["state"] not in found

    @call("ServiceClient.close")
    def _():
        done(need(service, "close")("success"))

    sys.stdout.write(json.dumps({"version": tinker.__version__, "calls": OUTCOMES}) + "\n")
    sys.stdout.flush()
    os._exit(0)


main()
