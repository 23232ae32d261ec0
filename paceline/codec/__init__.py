"""Convert wire messages to dataclasses and back.

Pure functions; decoding checks form (dtype, shape, length), never meaning.
"""

from paceline.codec.messages import make
from paceline.codec.models import (
    model_info_from_proto,
    model_info_to_proto,
    model_ref_from_proto,
    model_ref_to_proto,
    served_model_from_proto,
    served_model_to_proto,
)
from paceline.codec.resources import (
    checkpoint_from_proto,
    checkpoint_to_proto,
    quota_from_proto,
    quota_to_proto,
    run_from_proto,
    run_to_proto,
)
from paceline.codec.sampling import (
    delta_from_proto,
    sample_result_from_proto,
    sample_result_to_proto,
    sampling_params_from_proto,
    sampling_params_to_proto,
    spans_to_proto,
)
from paceline.codec.training import (
    datum_from_proto,
    datum_to_proto,
    lora_config_from_proto,
    lora_config_to_proto,
    optimizer_from_proto,
    optimizer_to_proto,
    output_from_proto,
    output_to_proto,
    parameters_from_proto,
    put_parameters,
    spec_from_proto,
    spec_to_proto,
    tensor_from_proto,
    tensor_to_proto,
    token_ids_from_proto,
)

__all__ = [
    "checkpoint_from_proto",
    "checkpoint_to_proto",
    "datum_from_proto",
    "datum_to_proto",
    "delta_from_proto",
    "lora_config_from_proto",
    "lora_config_to_proto",
    "make",
    "model_info_from_proto",
    "model_info_to_proto",
    "model_ref_from_proto",
    "model_ref_to_proto",
    "optimizer_from_proto",
    "optimizer_to_proto",
    "output_from_proto",
    "output_to_proto",
    "parameters_from_proto",
    "put_parameters",
    "quota_from_proto",
    "quota_to_proto",
    "run_from_proto",
    "run_to_proto",
    "sample_result_from_proto",
    "sample_result_to_proto",
    "sampling_params_from_proto",
    "sampling_params_to_proto",
    "served_model_from_proto",
    "served_model_to_proto",
    "spans_to_proto",
    "spec_from_proto",
    "spec_to_proto",
    "tensor_from_proto",
    "tensor_to_proto",
    "token_ids_from_proto",
]
