# megasched on NVIDIA's image of PyTorch; docs/docker.md says how to build it and how to run it.
#
# The image brings a torch and a Transformer Engine that were built for each other: 2.13.0a0 and 2.16 in 26.06. Both are
# in the range that megasched supports (megasched/versions.py, pyproject.toml). pip must leave them as they are.
ARG BASE=nvcr.io/nvidia/pytorch:26.06-py3

# hadolint ignore=DL3006
FROM ${BASE} AS wheel
COPY . /source
RUN PIP_CONSTRAINT="" python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /source

# hadolint ignore=DL3006
FROM ${BASE}
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
WORKDIR /opt/megasched
COPY constraints.txt .
COPY --from=wheel /wheels wheels

# kept.txt takes the place of the image's own constraints, which pin every package in it: what is compiled stays, and a
# pure Python package may become newer where transformers asks for that. That all has stayed is looked at afterwards.
RUN keep='^(torch|triton|pytorch.triton|transformer.engine|apex|flash.attn|numpy|nvidia|cuda|cupy)'; \
    python -m pip list --format freeze | grep --ignore-case --extended-regexp "$keep" >kept.txt; \
    grep --extended-regexp '^(megatron-core|transformers)==' constraints.txt >pinned.txt; \
    PIP_CONSTRAINT=kept.txt python -m pip install --no-cache-dir --requirement pinned.txt \
        "$(echo "$PWD"/wheels/megasched-*.whl)[quickstart,sft,tune]"; \
    python -m pip list --format freeze | grep --ignore-case --extended-regexp "$keep" | diff kept.txt -; \
    megasched --version

WORKDIR /workspace
