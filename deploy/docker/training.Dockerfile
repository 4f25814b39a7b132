# A base for training images: adds the agent and the library to an image that already has torch.
#   make images TRAINING_BASE=pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime@sha256:...
# Then, in your own Dockerfile:   FROM ddp-train   COPY train.py /work/
ARG TRAINING_BASE
# checkov:skip=CKV_DOCKER_7: the build command sets the base and its digest
FROM ${TRAINING_BASE} AS build
WORKDIR /src
COPY deploy/docker/service.requirements.txt ./
# Copies only wheels, so no build files remain. Includes the compiled core if the base has a compiler.
RUN python3 -m venv /build \
 && /build/bin/pip wheel --no-cache-dir --disable-pip-version-check --only-binary :all: --require-hashes \
        -r service.requirements.txt -w /wheels \
 && /build/bin/pip install --no-cache-dir --disable-pip-version-check --no-index --upgrade \
        --find-links /wheels setuptools
COPY pyproject.toml setup.py README.md LICENSE _ddp_launch_entry.py ./
COPY docs docs
COPY rendezvous rendezvous
COPY launcher launcher
COPY ddp ddp
COPY ddp_launch_wings ddp_launch_wings
RUN /build/bin/pip wheel --no-cache-dir --disable-pip-version-check --no-deps --no-build-isolation . -w /wheels \
 && rm /wheels/setuptools-*

FROM ${TRAINING_BASE}
COPY --from=build /wheels /wheels
# The version is that of the only wheel in /wheels.
# hadolint ignore=DL3013
RUN PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --no-cache-dir --disable-pip-version-check --no-index \
        --find-links /wheels ddp-launch \
 && mkdir -p /work && chown 10001:10001 /work
ENV PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /work
# A job is not a service, so it has no health check: its agent watches the ranks, and its exit code is the result.
HEALTHCHECK NONE
# `ddp-launch [options] train.py ...`
ENTRYPOINT ["ddp-launch"]
CMD ["--help"]
