# multilora on an NVIDIA GPU, on NVIDIA's own Triton image: 25.07 or later, with the Python backend ("-py3").
# From the repository's root:
#   docker build -f docker/gpu.Dockerfile --build-arg TRITON_IMAGE=<NVIDIA's registry>/tritonserver:25.10-py3 -t multilora:gpu .
ARG TRITON_IMAGE

FROM ${TRITON_IMAGE}
USER root
# A C compiler stays in the image: OpenAI Triton compiles the call into the driver on the GPU that it finds.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY constraints.txt ./
# In an environment of its own: the image's Python packages are the Triton backends'.
RUN python3 -m venv /opt/multilora \
 && /opt/multilora/bin/pip install --no-cache-dir -c constraints.txt torch
COPY kernels/ kernels/
COPY client/ client/
COPY backend_src/ backend_src/
COPY model_repository/ model_repository/
RUN /opt/multilora/bin/pip install --no-cache-dir -c constraints.txt ./kernels "./client[openai]" "./backend_src[serve]"
# For the processor too, so that the image serves where there is no GPU.
ENV MULTILORA_KERNELS_CACHE=/opt/multilora/kernels
RUN /opt/multilora/bin/python -m multilora_kernels.cpu \
 && /opt/multilora/bin/python -m multilora_engine.tritonserver.request_guard
RUN useradd --uid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin multilora \
 && install --directory --owner=10001 --group=10001 /adapters /compiled
# Compiled GPU kernels go below /tmp, which ends with the container. With a volume at /compiled, and this variable set to
# that, the next one does not compile them again.
ENV PATH=/opt/multilora/bin:/opt/tritonserver/bin:$PATH \
    MULTILORA_MODEL=/model \
    PYTHONDONTWRITEBYTECODE=1 \
    TRITON_CACHE_DIR=/tmp/triton
WORKDIR /opt/multilora
USER 10001:10001
EXPOSE 8000 8001 8002
VOLUME /model /adapters
HEALTHCHECK --interval=30s --timeout=70s --start-period=600s --retries=2 CMD ["multilora-serve", "probe"]
ENTRYPOINT ["multilora-serve", "--host", "0.0.0.0"]
