"""Every encoder and decoder pair round-trips, and malformed messages are refused by field."""

from dataclasses import fields
from datetime import UTC, datetime

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from paceline import codec, errors
from paceline.codec.resources import timestamp_from_proto, timestamp_to_proto
from paceline.codec.training import FLOATS, INTEGERS, MASKS
from paceline.sampler.v1 import sampler_service_pb2 as sampler_pb
from paceline.trainer.v1.trainer_service_pb2 import CreateRunRequest, ForwardBackwardRequest, OptimStepRequest
from paceline.types import (
    AdafactorParams,
    Adam8bitParams,
    AdamCpuParams,
    AdamParams,
    AdapterGroup,
    ApolloMiniParams,
    ApolloParams,
    Checkpoint,
    CheckpointKind,
    Datum,
    ForwardBackwardSpec,
    LoraConfig,
    ModelCertificate,
    ModelInfo,
    ModelRef,
    PackingMode,
    Reduction,
    Run,
    RunState,
    SampledSequence,
    SampleResult,
    SamplingParams,
    ServedModel,
    StopReason,
    StreamedTokens,
    TopkLogprobs,
    VersionSpan,
)
from paceline.types.optimizers import OPTIMIZERS
from paceline.types.v1 import lora_pb2, model_pb2, sampling_pb2, tensor_pb2

DTYPES = ["float16", "float32", "int32", "int64", "uint8"]

texts = st.text(max_size=20)
words = st.text(min_size=1, max_size=20)
counts = st.integers(0, 2**32 - 1)
larges = st.integers(0, 2**64 - 1)
reals = st.floats(allow_nan=False, allow_infinity=False)
singles = st.floats(allow_nan=False, width=32)
moments = st.datetimes(datetime(1971, 1, 1), datetime(2500, 1, 1), timezones=st.just(UTC))
vectors = arrays.arrays(np.float32, st.integers(0, 5), elements=st.floats(width=32))
token_rows = arrays.arrays(np.int32, st.integers(1, 5))

refs = st.one_of(
    st.builds(ModelRef, base=texts),
    st.builds(ModelRef, run_id=words, version=st.none() | st.integers(1, 2**64 - 1)),
    st.builds(ModelRef, checkpoint=words),
)
served = st.builds(ServedModel, texts, texts, larges, texts, texts)
groups = st.builds(AdapterGroup, texts, st.lists(texts, max_size=3).map(tuple), texts)
certificates = st.builds(
    ModelCertificate, packing=st.sampled_from(PackingMode), attention=texts, reason=texts, tokens=counts,
    logprob_difference=reals, logprob_bound=reals, gradient_difference=reals, gradient_bound=reals, seconds=reals,
    groups=st.lists(groups, max_size=3).map(tuple),
)  # fmt: skip
infos = st.builds(ModelInfo, texts, counts, counts, texts, counts, counts, st.none() | certificates)
loras = st.builds(
    LoraConfig, counts, reals, reals, larges, st.booleans(), st.booleans(), st.booleans(),
    st.lists(counts, max_size=4).map(tuple), st.booleans(), st.lists(texts, max_size=3).map(tuple),
)  # fmt: skip
adams = [st.builds(kind, *[reals] * 6) for kind in (AdamParams, Adam8bitParams, AdamCpuParams)]
adafactors = st.builds(AdafactorParams, *[reals] * 5, st.booleans(), st.booleans(), reals, reals)
apollos = st.builds(ApolloParams, *[reals] * 6, counts, reals, counts, reals, larges)
apollo_minis = st.builds(ApolloMiniParams, *[reals] * 7, counts, reals, larges)
params = st.builds(
    SamplingParams, st.none() | counts, singles, singles, counts, singles, st.none() | larges,
    st.lists(texts, max_size=3).map(tuple), st.lists(counts, max_size=3).map(tuple), st.booleans(), counts, texts,
    texts,
)  # fmt: skip
runs = st.builds(
    Run, texts, texts, loras, larges, larges, larges, st.sampled_from(RunState), texts, moments, larges,
    st.dictionaries(texts, texts, max_size=3), st.lists(texts, max_size=3).map(tuple),
)  # fmt: skip
checkpoints = st.builds(
    Checkpoint, texts, texts, st.sampled_from(CheckpointKind), texts, larges, larges, texts, texts, moments,
    st.none() | moments,
)  # fmt: skip


@given(arrays.arrays(st.sampled_from(DTYPES), arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)))
def test_tensors(array):
    decoded = codec.tensor_from_proto(codec.tensor_to_proto(array), "x", DTYPES, ndim=array.ndim)
    assert decoded.dtype == array.dtype
    assert decoded.shape == array.shape
    np.testing.assert_array_equal(decoded, array)


def test_tensors_travel_little_endian_and_row_major():
    array = np.array([[1, 2], [3, 4]], ">i4").T
    message = codec.tensor_to_proto(array)
    assert message.data == np.array([1, 3, 2, 4], "<i4").tobytes()
    np.testing.assert_array_equal(codec.tensor_from_proto(message, "x", INTEGERS, ndim=2), array)


@given(token_rows, st.dictionaries(st.sampled_from(["advantages", "weights"]), vectors))
def test_datums(tokens, inputs):
    datum = Datum(tokens, inputs | {"target_tokens": tokens.astype(np.int64), "mask": np.ones(3, np.uint8)})
    decoded = codec.datum_from_proto(codec.datum_to_proto(datum), "data[0]")
    np.testing.assert_array_equal(decoded.model_input, tokens)
    assert decoded.loss_fn_inputs.keys() == datum.loss_fn_inputs.keys()
    for name, values in datum.loss_fn_inputs.items():
        assert decoded.loss_fn_inputs[name].dtype == values.dtype
        np.testing.assert_array_equal(decoded.loss_fn_inputs[name], values)


@given(st.dictionaries(words, vectors, max_size=3))
def test_outputs(output):
    decoded = codec.output_from_proto(codec.output_to_proto(output), "outputs[0]")
    assert decoded.keys() == output.keys()
    for name, values in output.items():
        np.testing.assert_array_equal(decoded[name], values)


@given(loras)
def test_lora_configs(config):
    assert codec.lora_config_from_proto(codec.lora_config_to_proto(config)) == config


def test_the_default_alpha_is_twice_the_rank():
    assert codec.lora_config_from_proto(codec.lora_config_to_proto(LoraConfig(rank=8))).alpha == 16


@given(st.one_of(*adams, adafactors, apollos, apollo_minis))
def test_optimizers(given_params):
    assert codec.optimizer_from_proto(codec.optimizer_to_proto(given_params)) == given_params


@pytest.mark.parametrize(("name", "kind"), OPTIMIZERS.items())
def test_an_optimizer_without_settings_has_its_defaults(name, kind):
    assert codec.optimizer_from_proto(OptimStepRequest(**{name: {}})) == kind()


def test_every_optimizer_of_the_contract_has_settings_of_its_own_and_all_of_them():
    members = OptimStepRequest.DESCRIPTOR.oneofs_by_name["optimizer"].fields
    contract = {member.name: {setting.name for setting in member.message_type.fields} for member in members}
    assert contract.pop("discard_gradient") == set(), "which is no optimizer"
    assert contract == {name: {setting.name for setting in fields(kind)} for name, kind in OPTIMIZERS.items()}


def test_a_request_without_an_optimizer_is_refused():
    with pytest.raises(errors.MissingField):
        codec.optimizer_from_proto(OptimStepRequest())


def test_what_is_no_optimizers_settings_has_no_wire_form():
    with pytest.raises(errors.InvalidArgument, match=r"is of type LoraConfig; give .* AdamParams") as caught:
        codec.optimizer_to_proto(LoraConfig())
    assert caught.value.field == "optim_params"


def test_a_setting_without_a_value_is_refused_since_the_trainer_would_take_its_own():
    with pytest.raises(errors.MissingField) as caught:
        codec.optimizer_to_proto(AdamParams(weight_decay=None))
    assert caught.value.field == "adamw.weight_decay"


@pytest.mark.parametrize(
    ("fields", "error", "field", "wanted"),
    [
        ({"base_model": 1}, errors.InvalidArgument, "base_model", "is of type int; give a string"),
        ({"base_model": "\ud800"}, errors.InvalidArgument, "base_model", r"cannot be sent: .*; give a string"),
        (
            {"user_metadata": {"a": "", "c": 1}},
            errors.InvalidArgument,
            "user_metadata[c]",
            "is of type int; give a string",
        ),
        ({"user_metadata": {1: "b"}}, errors.InvalidArgument, "user_metadata.key", "is of type int; give a string"),
        ({"user_metadata": "text"}, errors.InvalidArgument, "user_metadata", "is of type str; give a dict"),
        ({"lora": 1}, errors.InvalidArgument, "lora", "is of type int; give a LoraConfig"),
    ],
)
def test_what_does_not_fit_its_field_is_refused_by_the_field(fields, error, field, wanted):
    with pytest.raises(error, match=wanted) as caught:
        codec.make(CreateRunRequest, "request.", **fields)
    assert caught.value.field == f"request.{field}"


@pytest.mark.parametrize(
    ("fields", "error", "field", "wanted"),
    [
        ({"rank": -1}, errors.OutOfRange, "rank", "must not be negative$"),
        ({"rank": 1 << 32}, errors.OutOfRange, "rank", "is too large; give at most 4294967295$"),
        ({"rank": 1.5}, errors.InvalidArgument, "rank", "is of type float; give an integer$"),
        ({"alpha": 10**400}, errors.OutOfRange, "alpha", "give a number"),
        ({"layers": 3}, errors.InvalidArgument, "layers", "is of type int; give a list"),
        ({"layers": [0, -1]}, errors.OutOfRange, "layers[1]", "must not be negative$"),
        ({"layers": iter([0, -1])}, errors.OutOfRange, "layers[1]", "must not be negative$"),
        ({"rank": 1, "train_attn": "yes"}, errors.InvalidArgument, "train_attn", "is of type str; give a bool"),
    ],
)
def test_a_number_outside_its_fields_range_is_out_of_range(fields, error, field, wanted):
    with pytest.raises(error, match=wanted) as caught:
        codec.make(lora_pb2.LoraConfig, **fields)
    assert (type(caught.value), caught.value.field) == (error, field)


@given(params)
def test_sampling_params(given_params):
    assert codec.sampling_params_from_proto(codec.sampling_params_to_proto(given_params)) == given_params


def test_what_is_not_set_keeps_its_default():
    assert codec.sampling_params_from_proto(sampling_pb2.SamplingParams()) == SamplingParams()


@given(refs)
def test_model_refs(ref):
    assert codec.model_ref_from_proto(codec.model_ref_to_proto(ref)) == ref


@given(served)
def test_served_models(model):
    assert codec.served_model_from_proto(codec.served_model_to_proto(model)) == model


@given(infos)
def test_model_infos(info):
    assert codec.model_info_from_proto(codec.model_info_to_proto(info)) == info


@given(runs)
def test_runs(run):
    assert codec.run_from_proto(codec.run_to_proto(run)) == run


@given(checkpoints)
def test_checkpoints(checkpoint):
    assert codec.checkpoint_from_proto(codec.checkpoint_to_proto(checkpoint)) == checkpoint


@given(moments)
def test_moments(moment):
    assert timestamp_from_proto(timestamp_to_proto(moment)) == moment


SPANS = (VersionSpan(3, 0), VersionSpan(4, 1, mixed=True))


@given(served, counts, st.none() | vectors, st.booleans(), st.sampled_from(StopReason))
def test_sample_results(model, hits, prompt_logprobs, with_topk, stop_reason):
    ids = np.array([[1, 2], [3, -1]], np.int32)
    topk = TopkLogprobs(ids, np.array([[-1, -2], [-3, np.nan]], np.float32)) if with_topk else None
    sequence = SampledSequence(np.array([4, 5], np.int32), np.array([-0.5, -2], np.float32), stop_reason, topk, SPANS)
    result = SampleResult([sequence, sequence], model, prompt_logprobs, topk, hits)
    decoded = codec.sample_result_from_proto(codec.sample_result_to_proto(result))
    assert (decoded.model, decoded.prompt_cache_hit_tokens) == (model, hits)
    assert [one.stop_reason for one in decoded.sequences] == [stop_reason] * 2
    assert [one.version_spans for one in decoded.sequences] == [SPANS] * 2
    np.testing.assert_equal(decoded.prompt_logprobs, prompt_logprobs)
    for got, expected in [(decoded.topk_prompt_logprobs, topk), (decoded.sequences[1].topk_logprobs, topk)]:
        assert (got is None) == (expected is None)
        if got and expected:
            np.testing.assert_array_equal(got.token_ids, expected.token_ids)
            np.testing.assert_array_equal(got.logprobs, expected.logprobs)
    np.testing.assert_array_equal(decoded.sequences[0].tokens, sequence.tokens)
    np.testing.assert_array_equal(decoded.sequences[0].logprobs, sequence.logprobs)


@given(st.lists(counts, max_size=4), st.lists(singles, max_size=4), st.none() | st.sampled_from(StopReason), served)
def test_streamed_tokens(tokens, logprobs, stop_reason, model):
    message = sampler_pb.SampleStreamResponse(
        index=3,
        tokens=tokens,
        logprobs=logprobs,
        stop_reason=sampling_pb2.StopReason.ValueType(stop_reason.value if stop_reason else 0),
        model=codec.served_model_to_proto(model),
        version_spans=codec.spans_to_proto(SPANS),
    )
    assert codec.delta_from_proto(message) == StreamedTokens(3, tokens, logprobs, stop_reason, model, SPANS)


@pytest.mark.parametrize(
    ("message", "error", "field"),
    [
        (tensor_pb2.Tensor(shape=[1], data=b"0000"), errors.InvalidDtype, "x.dtype"),
        (tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_INT64, shape=[1], data=bytes(8)), errors.InvalidDtype, "x.dtype"),
        (tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_BFLOAT16, shape=[1], data=bytes(2)), errors.InvalidDtype, "x.dtype"),
        (tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_FLOAT32, data=bytes(4)), errors.InvalidShape, "x.shape"),
        (
            tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_FLOAT32, shape=[1, 1], data=bytes(4)),
            errors.InvalidShape,
            "x.shape",
        ),
        (tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_FLOAT32, shape=[-1], data=bytes(4)), errors.InvalidShape, "x.shape"),
        (tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_FLOAT32, shape=[2], data=bytes(4)), errors.InvalidShape, "x.data"),
        (tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_FLOAT32, shape=[1], data=bytes(5)), errors.InvalidShape, "x.data"),
    ],
)
def test_a_malformed_tensor_is_refused_by_the_name_of_its_field(message, error, field):
    with pytest.raises(error) as caught:
        codec.tensor_from_proto(message, "x", FLOATS)
    assert caught.value.field == field


@pytest.mark.parametrize("name", ["float64", "complex64", "bool", "int16"])
def test_a_dtype_that_the_wire_lacks_is_refused_by_the_name_of_its_field(name):
    with pytest.raises(errors.InvalidDtype) as caught:
        codec.tensor_to_proto(np.zeros(2, name), "data[0].model_input")
    assert caught.value.field == "data[0].model_input"


@pytest.mark.parametrize(
    ("inputs", "field"),
    [
        ({"target_tokens": np.zeros(2, np.float32)}, "data[4].loss_inputs[target_tokens].dtype"),
        ({"mask": np.zeros(2, np.float32)}, "data[4].loss_inputs[mask].dtype"),
        ({"advantages": np.zeros(2, np.int64)}, "data[4].loss_inputs[advantages].dtype"),
        ({"advantages": np.zeros((2, 2), np.float32)}, "data[4].loss_inputs[advantages].shape"),
        ({"weights": np.zeros((2, 2, 2), np.float32)}, "data[4].loss_inputs[weights].shape"),
        ({"sequence_ratio_mask": np.zeros(2, np.float32)}, "data[4].loss_inputs[sequence_ratio_mask].dtype"),
        ({"clip_low_threshold": np.zeros(2, np.uint8)}, "data[4].loss_inputs[clip_low_threshold].dtype"),
    ],
)
def test_a_loss_input_of_the_wrong_form_is_refused_by_its_name(inputs, field):
    message = codec.datum_to_proto(Datum(np.zeros(2, np.int32), inputs))
    with pytest.raises(errors.InvalidArgument) as caught:
        codec.datum_from_proto(message, "data[4]")
    assert caught.value.field == field


def test_several_targets_per_position_keep_their_shape():
    inputs = {"target_tokens": np.arange(6).reshape(3, 2), "weights": np.ones((3, 2), np.float32)}
    decoded = codec.datum_from_proto(codec.datum_to_proto(Datum(np.arange(3, dtype=np.int32), inputs)), "data[0]")
    output = codec.output_from_proto(codec.output_to_proto({"logprobs": inputs["weights"]}), "outputs[0]")
    for name, values in inputs.items():
        np.testing.assert_array_equal(decoded.loss_fn_inputs[name], values)
    np.testing.assert_array_equal(output["logprobs"], inputs["weights"])


SPEC_FIELDS = {
    "loss_fn": st.text(),
    "loss_fn_config": st.dictionaries(st.text(), st.floats(allow_nan=False)),
    "reduction": st.sampled_from(Reduction),
    "reduction_count": st.none() | st.integers(0, 2**31 - 1),
    "forward_only": st.booleans(),
    "refuse_non_finite": st.booleans(),
}


def test_every_option_of_forward_backward_is_sent():
    assert [field.name for field in fields(ForwardBackwardSpec)] == list(SPEC_FIELDS)


@given(st.builds(ForwardBackwardSpec, **SPEC_FIELDS))
def test_specs_of_forward_backward(spec):
    request = codec.spec_to_proto(spec)
    assert codec.spec_from_proto(request) == spec


def test_an_unset_reduction_is_the_sum_and_an_unknown_one_is_refused():
    assert codec.spec_from_proto(ForwardBackwardRequest()).reduction is Reduction.SUM
    with pytest.raises(errors.InvalidArgument) as caught:
        codec.spec_from_proto(ForwardBackwardRequest(reduction=9))
    assert caught.value.field == "reduction"


def test_a_datum_without_tokens_is_refused():
    with pytest.raises(errors.EmptyBatch) as caught:
        codec.token_ids_from_proto(codec.tensor_to_proto(np.zeros(0, np.int32)), "prompt")
    assert caught.value.field == "prompt"


def test_masks_are_bytes():
    mask = np.array([0, 1], np.uint8)
    np.testing.assert_array_equal(codec.tensor_from_proto(codec.tensor_to_proto(mask), "mask", MASKS), mask)


@pytest.mark.parametrize(
    ("message", "error", "field"),
    [
        (model_pb2.ModelRef(), errors.MissingField, "model"),
        (model_pb2.ModelRef(version=model_pb2.VersionRef()), errors.MissingField, "model.version.run_id"),
        (
            model_pb2.ModelRef(version=model_pb2.VersionRef(run_id="r", version=0)),
            errors.OutOfRange,
            "model.version.version",
        ),
    ],
)
def test_a_reference_that_names_nothing_is_refused(message, error, field):
    with pytest.raises(error) as caught:
        codec.model_ref_from_proto(message)
    assert caught.value.field == field
