# syntax=docker/dockerfile:1

# The image that builds releases and that serves them.
#   docker build -t deliver:0.1.0 .
#   docker build -t deliver:0.1.0-cuda --build-arg EXTRAS=demo,serve,gpu \
#     --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .

ARG PYTHON=3.12

FROM python:${PYTHON}-slim-bookworm AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=demo,serve
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
RUN python -m venv /opt/deliver
ENV PATH=/opt/deliver/bin:$PATH
# torch changes rarely and is most of the image, so it has a layer of its own.
COPY constraints.txt ./
RUN pip install --constraint constraints.txt --extra-index-url "${TORCH_INDEX}" torch
COPY pyproject.toml README.md LICENSE ./
COPY delivery delivery
COPY pipelines pipelines
COPY smoke smoke
COPY baselines baselines
RUN pip install --constraint constraints.txt --extra-index-url "${TORCH_INDEX}" ".[${EXTRAS}]" \
    && python -m compileall -q /opt/deliver/lib

FROM python:${PYTHON}-slim-bookworm AS runtime
ARG EXTRAS=demo,serve
LABEL org.opencontainers.image.title="deliver" \
      org.opencontainers.image.description="From a weight commit to a signed Helm release" \
      org.opencontainers.image.licenses="Apache-2.0"
# Triton compiles the launcher of each kernel with the C compiler that it finds.
# hadolint ignore=DL3008
RUN case "${EXTRAS}" in *gpu*) \
        apt-get update && apt-get install --no-install-recommends --yes gcc libc6-dev \
        && rm -rf /var/lib/apt/lists/* ;; \
    esac
# The same number as in the chart's podSecurity.
RUN groupadd --gid 10001 deliver \
    && useradd --uid 10001 --gid 10001 --create-home --shell /usr/sbin/nologin deliver
COPY --from=build /opt/deliver /opt/deliver
ENV PATH=/opt/deliver/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    DELIVER_WORKDIR=/work/.deliver \
    DELIVER_CACHE=/work/.cache
WORKDIR /work
RUN chown deliver:deliver /work
USER 10001:10001
EXPOSE 23333
STOPSIGNAL SIGTERM
HEALTHCHECK NONE
ENTRYPOINT ["deliver"]
CMD ["--help"]
