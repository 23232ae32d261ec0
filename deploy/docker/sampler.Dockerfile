# The sampler, for GPUs or, with --build-arg VARIANT=cpu, for CPUs. Build from the root of the repository:
#   docker build --file deploy/docker/sampler.Dockerfile --tag paceline/sampler:gpu .
# Trainer and sampler share all layers up to the creation of the user.
# The same Python as `make test-gpu`.
ARG PYTHON=3.12
FROM python:${PYTHON}-slim-bookworm AS wheel
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim-bookworm
ARG VARIANT=gpu
# gpu: Triton compiles its kernels' launchers on first use. cpu: vLLM's CPU build links libnuma.
RUN apt-get update \
    && if [ "$VARIANT" = cpu ]; then package=libnuma1; else package=g++; fi \
    && apt-get install --yes --no-install-recommends "$package" \
    && rm -rf /var/lib/apt/lists/*
COPY requirements/${VARIANT}.txt /tmp/requirements.txt
# Set this to an index of PyTorch's CPU builds to keep CUDA's libraries out of the cpu image.
ARG PIP_EXTRA_INDEX_URL=
# Both requirements files are closed sets, but what torch requires on CPUs differs by build: install it first there.
RUN if [ "$VARIANT" = cpu ]; then \
        pip install --no-cache-dir --constraint /tmp/requirements.txt torch \
        && pip install --no-cache-dir --no-deps --requirement /tmp/requirements.txt; \
    else \
        pip install --no-cache-dir --no-deps --requirement /tmp/requirements.txt; \
    fi
# The cpu image contains the embedded model, so it works without a model hub.
COPY scripts/make_model.py /tmp/make_model.py
RUN if [ "$VARIANT" = cpu ]; then \
        python /tmp/make_model.py /usr/share/paceline/SmolLM2-135M-Instruct && chmod -R a+rX /usr/share/paceline; \
    fi
# A named volume takes the owner of the folder it is mounted on.
RUN groupadd --gid 10001 paceline && useradd --uid 10001 --gid paceline --create-home paceline \
    && install --directory --owner paceline --group paceline \
        /var/lib/paceline /var/lib/paceline/checkpoints /var/lib/paceline/models
COPY --from=wheel /wheels /tmp/wheels
RUN pip install --no-cache-dir --no-deps /tmp/wheels/*.whl
ENV PYTHONUNBUFFERED=1 \
    HF_HOME=/var/lib/paceline/models \
    PACELINE_SAMPLER_CHECKPOINT_DIR=/var/lib/paceline/checkpoints \
    PACELINE_SAMPLER_LISTEN=0.0.0.0:50052 \
    PACELINE_SAMPLER_HEALTH_LISTEN=0.0.0.0:50152 \
    PACELINE_SAMPLER_METRICS_LISTEN=0.0.0.0:9152
EXPOSE 50052 50152 9152
USER 10001:10001
WORKDIR /home/paceline
ENTRYPOINT ["python", "-m", "paceline.services", "sampler_service"]
