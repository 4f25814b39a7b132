# A base for training images: the agent and the library on top of an image that has torch already.
#   make images TRAINING_BASE=pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime@sha256:...
# Then, in your own:   FROM ddp-train   COPY train.py /work/
ARG TRAINING_BASE
# checkov:skip=CKV_DOCKER_7: which base it is, and its digest, is said when it is built
FROM ${TRAINING_BASE} AS build
WORKDIR /src
COPY deploy/docker/service.requirements.txt ./
# Wheels only, so that nothing of the build stays behind. The compiled core comes along where the base has a compiler.
RUN python3 -m venv /build \
 && /build/bin/pip wheel --no-cache-dir --disable-pip-version-check --only-binary :all: --require-hashes \
        -r service.requirements.txt -w /wheels \
 && /build/bin/pip install --no-cache-dir --disable-pip-version-check --no-index --upgrade \
        --find-links /wheels setuptools
COPY pyproject.toml README.md LICENSE ./
COPY rendezvous rendezvous
COPY launcher launcher
COPY ddp ddp
RUN /build/bin/pip wheel --no-cache-dir --disable-pip-version-check --no-deps --no-build-isolation . -w /wheels \
 && rm /wheels/setuptools-*

FROM ${TRAINING_BASE}
COPY --from=build /wheels /wheels
# Its version is that of the one wheel in /wheels.
# hadolint ignore=DL3013
RUN PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --no-cache-dir --disable-pip-version-check --no-index \
        --find-links /wheels ddp-launch \
 && mkdir -p /work && chown 10001:10001 /work
ENV PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /work
# A job is no service: its agent watches the ranks, and its exit code says how it ended.
HEALTHCHECK NONE
# `ddp-launch [options] train.py ...`
ENTRYPOINT ["ddp-launch"]
CMD ["--help"]
