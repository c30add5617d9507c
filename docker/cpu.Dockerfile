# multilora on CPUs, with the tritonserver that PyPI has. From the repository's root:
#   docker build -f docker/cpu.Dockerfile -t multilora:cpu .
ARG BASE_IMAGE=debian:bookworm-slim

FROM ${BASE_IMAGE} AS build
RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates g++ python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY constraints.txt ./
# PyPI's torch brings CUDA's libraries, some 3 GB. The address of PyTorch's own package index for CPUs avoids them.
ARG TORCH_INDEX_URL=""
RUN python3 -m venv /opt/multilora \
 && /opt/multilora/bin/pip install --no-cache-dir -c constraints.txt ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} torch
COPY kernels/ kernels/
COPY client/ client/
COPY backend_src/ backend_src/
COPY model_repository/ model_repository/
RUN /opt/multilora/bin/pip install --no-cache-dir -c constraints.txt ./kernels "./client[openai]" "./backend_src[serve]" \
 && /opt/multilora/bin/pip install --no-cache-dir -c constraints.txt --no-deps nvidia-pytriton
# The C++ operators, for every processor: the widest instructions are chosen when they run.
ENV MULTILORA_KERNELS_CACHE=/opt/multilora/kernels
RUN /opt/multilora/bin/python -m multilora_kernels.cpu \
 && /opt/multilora/bin/python -m multilora_engine.tritonserver.request_guard

FROM ${BASE_IMAGE}
RUN apt-get update \
 && apt-get install --yes --no-install-recommends ca-certificates libpython3.11 python3 \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin multilora \
 && install --directory --owner=10001 --group=10001 /adapters
COPY --from=build /opt/multilora /opt/multilora
# Nothing below / is written at run time except /tmp, /dev/shm and the volume for the disk tier, if there is one.
ENV PATH=/opt/multilora/bin:$PATH \
    MULTILORA_KERNELS_CACHE=/opt/multilora/kernels \
    MULTILORA_MODEL=/model \
    PYTHONDONTWRITEBYTECODE=1
WORKDIR /opt/multilora
USER 10001:10001
EXPOSE 8000 8001 8002
VOLUME /model /adapters
HEALTHCHECK --interval=30s --timeout=70s --start-period=300s --retries=2 CMD ["multilora-serve", "probe"]
# Ctrl-C and SIGTERM both end it in order; within a container there is nothing to reach on the loopback alone.
ENTRYPOINT ["multilora-serve", "--host", "0.0.0.0"]
