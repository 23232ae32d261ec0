#!/usr/bin/env bash
# Run the tests that compare numbers as on a CPU that has AVX2 and nothing newer.   scripts/test_avx2.sh BIN
set -euo pipefail
bin=$1
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
# Limit PyTorch's own kernels, oneDNN's and MKL's. By shape, matrix products take other kernels than with AVX-512 or AMX.
export ATEN_CPU_CAPABILITY=avx2 DNNL_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2
unit=(sampler_service/engine/vllm/cpu trainer_service/engine/{engine_losses,engine_optimizers,engine_runs,peft_engine}
    trainer_service/engine/{loss,optimizers,weight_sharing} trainer_service/engine/microbatch/joint_passes
    trainer_service/engine/model/{base_model,fused_layers,logprobs,lora_linear,packed_attention}
    trainer_service/engine/runs/{async_save,full_run,offload,state_files})
paths=()
for name in "${unit[@]}"; do
    folder=tests/unit/$name
    [ -d "$folder" ] && paths+=("$folder") || paths+=("$(dirname "$folder")/test_$(basename "$folder").py")
done
# Tests of several ranks that do not compare numbers, and are left out.
others="runs_of_several_ranks_wait_on_disk or death_of_any_process or closing_leaves_no_process"
"$bin/python" -m pytest -m "not gpu and not clients and not install and not page" -n "$(env -u OMP_NUM_THREADS nproc)" --dist loadfile --no-loadscope-reorder \
    -k "not ($others)" tests/integration/test_ranks.py "${paths[@]}"
