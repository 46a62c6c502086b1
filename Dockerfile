# Two images from one file:
#   docker build -t msdg-vllm .                     for NVIDIA GPUs, on vLLM's own image
#   docker build -t msdg-vllm-cpu --target cpu .    for CPUs, with the bundled model
# docs/deployment.md says how to run them; `make image-proof` runs the second without Docker.

ARG VLLM_VERSION=0.32.0
ARG PYTHON_VERSION=3.11


# All that changes with the pinned versions only, so that a change of our code builds in seconds.
FROM python:${PYTHON_VERSION}-slim-bookworm AS cpu-environment
WORKDIR /opt/msdg-vllm
ENV PIP_NO_CACHE_DIR=1
COPY pyproject.toml README.md LICENSE ./
COPY scripts scripts
COPY msdg_vllm/__init__.py msdg_vllm/
RUN python3 scripts/setup.py --venv /opt/venv --extra cpu --constraints scripts/pinned.txt


FROM python:${PYTHON_VERSION}-slim-bookworm AS cpu
# vLLM links against libnuma and compiles kernels for this very CPU when it starts, with g++.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home --home-dir /cache msdg
WORKDIR /opt/msdg-vllm
COPY --from=cpu-environment /opt/venv /opt/venv
COPY models models
COPY server server
COPY msdg_vllm msdg_vllm
# One GiB holds the KV cache of many chats with the bundled model; give a real one more.
ENV HOME=/cache \
    PATH=/opt/venv/bin:$PATH \
    VLLM_CPU_KVCACHE_SPACE=1
LABEL org.opencontainers.image.title="msdg-vllm-cpu" \
      org.opencontainers.image.description="vLLM with visual token pruning, for CPUs, with a small model" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.1.0"
USER 10001
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --start-period=10m --start-interval=5s --interval=30s --timeout=5s --retries=3 \
    CMD ["python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health/ready', timeout=4)"]
# tini passes signals on from the first second, and collects what vLLM's processes leave behind.
ENTRYPOINT ["tini", "--", "msdg-vllm", "serve"]
# Docker gives a container 64 MB of shared memory, and vLLM's default on a CPU takes 400 MB of it to
# talk to a worker process; this one needs none. With --shm-size=1g leave it out.
CMD ["--model", "models/scenes-llava", \
     "--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor"]


FROM python:${PYTHON_VERSION}-slim-bookworm AS wheel
WORKDIR /opt/msdg-vllm
COPY pyproject.toml README.md LICENSE ./
COPY scripts/build_hook.py scripts/
COPY server server
COPY msdg_vllm msdg_vllm
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /opt/wheels .


FROM vllm/vllm-openai:v${VLLM_VERSION} AS gpu
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home --home-dir /cache msdg
# An empty folder: Python looks here first.
WORKDIR /opt/msdg-vllm
# vLLM is there already and stays as it is; uv is how its image installs into itself.
RUN --mount=type=bind,from=wheel,source=/opt/wheels,target=/opt/wheels \
    uv pip install --system --no-cache --no-deps /opt/wheels/*.whl
ENV HOME=/cache
LABEL org.opencontainers.image.title="msdg-vllm" \
      org.opencontainers.image.description="vLLM with visual token pruning, for NVIDIA GPUs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.1.0"
USER 10001
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --start-period=30m --start-interval=5s --interval=30s --timeout=5s --retries=3 \
    CMD ["python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health/ready', timeout=4)"]
ENTRYPOINT ["tini", "--", "msdg-vllm", "serve"]
CMD ["--help=msdg-vllm"]
