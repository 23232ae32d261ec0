# The gateway: small, no torch. Build from the root of the repository:
#   docker build --file deploy/docker/gateway.Dockerfile --tag paceline/gateway .
# The same Python as `make test-gpu`.
ARG PYTHON=3.12
FROM python:${PYTHON}-slim-bookworm AS wheel
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim-bookworm
COPY requirements/gateway.txt /tmp/requirements.txt
RUN pip install --no-cache-dir --no-deps --requirement /tmp/requirements.txt
RUN groupadd --gid 10001 paceline && useradd --uid 10001 --gid paceline --create-home paceline \
    && install --directory --mode 0700 --owner paceline --group paceline /var/lib/paceline/http
COPY --from=wheel /wheels /tmp/wheels
RUN pip install --no-cache-dir --no-deps /tmp/wheels/*.whl
ENV PYTHONUNBUFFERED=1 \
    PACELINE_GATEWAY_LISTEN=0.0.0.0:50050 \
    PACELINE_GATEWAY_HEALTH_LISTEN=0.0.0.0:50150 \
    PACELINE_GATEWAY_METRICS_LISTEN=0.0.0.0:9150
EXPOSE 50050 50150 9150
USER 10001:10001
WORKDIR /home/paceline
ENTRYPOINT ["python", "-m", "paceline.services", "gateway"]
