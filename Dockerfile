# psgrad as a user without rights, which needs no network:
#
#   docker build -t psgrad --build-arg VERSION=1.2.0 .
#   docker run --rm --network none --user "$(id -u):$(id -g)" -v "$PWD:/work" psgrad analyze psgrad.yaml
#
# For a GPU name an image with CUDA, Python and PyTorch, and run with --gpus all:
#
#   docker build -t psgrad --build-arg BASE=pytorch/pytorch:TAG .
ARG BASE=python:3.12-slim
FROM ${BASE}

# Where PyTorch comes from if the base has none.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# The Python of such an image is the system's, and nothing else uses it.
ENV PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1

# The version that psgrad will say it has: no tag is copied.
ARG VERSION=0.0
ENV SETUPTOOLS_SCM_PRETEND_VERSION_FOR_PSGRAD=${VERSION}

WORKDIR /opt/psgrad
COPY . .
RUN python3 -c "import torch" 2>/dev/null \
    || python3 -m pip install --index-url "$TORCH_INDEX" "torch>=2.11,<2.16"
RUN python3 -m pip install ".[dp,hugging-face,vision]"

# Any user id works: libraries keep their caches in /tmp, and ask for a name that no file of users has.
ENV HOME=/tmp USER=psgrad MPLCONFIGDIR=/tmp/matplotlib HF_HUB_OFFLINE=1
USER 1000:1000
WORKDIR /work
ENTRYPOINT ["psgrad"]
CMD ["--help"]
