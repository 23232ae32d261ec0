#!/usr/bin/env bash
# Run the tests that compare numbers again, as on a CPU that has AVX2 and nothing newer.   scripts/test_avx2.sh BIN
set -euo pipefail
bin=$1
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
# PyTorch's own kernels, oneDNN's and MKL's; products of other shapes take other kernels than with AVX-512 or AMX.
export ATEN_CPU_CAPABILITY=avx2 DNNL_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2
unit=(borrowed_base captures cpu_lora engine_losses engine_optimizers engine_runs engine_state full_parameters fused_layers
    joint_passes logprobs lora_linear losses optimizers packed_attention paging peft_engine trading_settings varlen)
paths=("${unit[@]/#/tests/unit/test_}")
paths=("${paths[@]/%/.py}")
# Of the tests of several ranks, those that compare what they compute.
others="runs_of_several_ranks_wait_on_disk or death_of_any_process or closing_leaves_no_process"
"$bin/python" -m pytest -m "not gpu and not clients" -n "$(env -u OMP_NUM_THREADS nproc)" --dist loadfile --no-loadscope-reorder \
    -k "not ($others)" tests/integration/test_ranks.py "${paths[@]}"
