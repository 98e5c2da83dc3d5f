# syntax=docker/dockerfile:1
# kvrelay with its kernels compiled; the images have no compiler and run as a user without rights (docs/kubernetes.md).
#
#   docker build --target cpu  -t kvrelay:cpu .
#   docker build --target cuda -t kvrelay:cuda --build-arg MODEL=Qwen/Qwen2.5-7B-Instruct --build-arg CUDA_ARCH="9.0a" .
#
# Both run `kvrelay serve` by default; compose.yaml and configs/kuberay.yaml start Ray in them instead.

ARG SYSTEM=ubuntu:24.04
ARG CUDA_BUILD=nvidia/cuda:13.0.2-devel-ubuntu24.04

# ---- what both images run on: Python 3.12, no compiler
FROM ${SYSTEM} AS runtime
# wget: probes that KubeRay adds; tini: signals reach the server, and ended processes are reaped
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3.12 tini wget \
    && rm -rf /var/lib/apt/lists/*
# numbers, not names, so that Kubernetes' runAsNonRoot can check them
RUN groupadd --gid 10001 kvrelay \
    && useradd --uid 10001 --gid 10001 --create-home --shell /bin/bash kvrelay \
    && install -d -o kvrelay -g kvrelay /var/cache/kvrelay
ENV PATH=/opt/kvrelay/bin:/usr/local/bin:/usr/bin:/bin \
    KVRELAY_CACHE=/var/cache/kvrelay \
    HF_HOME=/var/cache/kvrelay/huggingface \
    FLASHINFER_WORKSPACE_BASE=/var/cache/kvrelay \
    RAY_worker_niceness=0 \
    RAY_USAGE_STATS_ENABLED=0 \
    PYTHONUNBUFFERED=1
WORKDIR /home/kvrelay
COPY configs /etc/kvrelay
USER 10001:10001
# converted checkpoints: kept between containers
VOLUME /var/cache/kvrelay
EXPOSE 8000 8265 6379
STOPSIGNAL SIGTERM
# `kvrelay serve`, and a node of Ray that has Serve's proxy, answer here; compose.yaml asks a Ray node without one elsewhere
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=3 \
    CMD ["wget", "-q", "-O", "/dev/null", "http://127.0.0.1:8000/health"]
ENTRYPOINT ["tini", "--"]
CMD ["kvrelay", "serve", "--host", "0.0.0.0"]

# ---- CPU: installs, and compiles the kernels in C for every level of this kind of processor
FROM ${SYSTEM} AS build-cpu
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3.12 -m venv /opt/kvrelay
ENV PATH=/opt/kvrelay/bin:$PATH
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --index-url "${TORCH_INDEX}" "torch>=2.8,<2.14"
COPY . /src
RUN pip install --no-cache-dir "/src[redis,s3,tracing]"
RUN kvrelay prepare --cpu all

# ---- CUDA: the same, and FlashInfer's modules for a model's shapes and a GPU's architecture; no GPU is needed. Not Triton's kernels
# (drawing tokens, products with quantised weights, checksums, cuda_ipc): those need a C compiler where they run
FROM ${CUDA_BUILD} AS build-cuda
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ ninja-build python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3.12 -m venv /opt/kvrelay
ENV PATH=/opt/kvrelay/bin:$PATH CUDA_HOME=/usr/local/cuda
COPY . /src
RUN pip install --no-cache-dir "/src[cuda,redis,s3,tracing]"
RUN kvrelay prepare --cpu all
ARG MODEL=Qwen/Qwen2.5-7B-Instruct
ARG CUDA_ARCH=9.0a
# config.json alone decides the kernels. The secret is for gated models: --secret id=hf_token,env=HF_TOKEN
RUN --mount=type=secret,id=hf_token,env=HF_TOKEN,required=false \
    hf download "${MODEL}" config.json --local-dir /tmp/model \
    && kvrelay prepare /tmp/model $(printf -- '--arch %s ' ${CUDA_ARCH}) \
        --output "$(python -c 'import flashinfer, pathlib; print(pathlib.Path(flashinfer.__file__).parent / "data/aot")')" \
    && rm -rf /tmp/model

# ---- the images
FROM runtime AS cuda
COPY --from=build-cuda /opt/kvrelay /opt/kvrelay
# torch's packages bring CUDA's libraries; NVIDIA's container toolkit mounts the driver
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM runtime AS cpu
COPY --from=build-cpu /opt/kvrelay /opt/kvrelay
