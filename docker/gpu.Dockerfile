# artel on GPUs of NVIDIA, as a user without rights. `make image` builds it: artel:gpu
FROM python:3.11-slim
# torch brings the libraries of CUDA; g++ compiles the parts in C++ and the kernels of triton on first use.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /artel
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN grep "^torch==" constraints.txt > torch.txt && pip install --no-cache-dir --requirement torch.txt
COPY src src
RUN pip install --no-cache-dir --constraint constraints.txt ".[lora,quantize,fast,near,parquet,s3,report,serve]" \
    && useradd --create-home --uid 1000 artel
USER 1000
WORKDIR /home/artel
ENV PYTHONUNBUFFERED=1 ARTEL_HEARTBEAT=/tmp/artel-heartbeat
# A run that trains changes this file. Other commands do not have it, and are taken for healthy.
HEALTHCHECK --interval=1m --timeout=30s --start-period=1m \
    CMD ["sh", "-c", "test ! -e /tmp/artel-heartbeat || find /tmp/artel-heartbeat -mmin -60 | grep -q ."]
ENTRYPOINT ["artel"]
CMD ["--help"]
