# The rendezvous service. It has no torch, needs no shell and no root, and writes only to mounted folders.
#   make images BASE=python:3.13-slim-bookworm@sha256:...
# BASE has Python 3.11 or newer. Name it by digest, so that the same build gives the same image.
ARG BASE
# checkov:skip=CKV_DOCKER_7: the build command sets the base and its digest
FROM ${BASE} AS build
WORKDIR /src
COPY deploy/docker/service.requirements.txt ./
RUN python3 -m venv /opt/ddp-launch \
 && /opt/ddp-launch/bin/pip install --no-cache-dir --disable-pip-version-check --only-binary :all: \
        --require-hashes -r service.requirements.txt
COPY pyproject.toml setup.py README.md LICENSE _ddp_launch_entry.py ./
COPY docs docs
COPY rendezvous rendezvous
COPY launcher launcher
COPY ddp ddp
COPY ddp_launch_wings ddp_launch_wings
RUN /opt/ddp-launch/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps --no-build-isolation . \
 && /opt/ddp-launch/bin/pip uninstall --yes --disable-pip-version-check setuptools \
 && /opt/ddp-launch/bin/python -m compileall -q /opt/ddp-launch/lib

FROM ${BASE}
COPY --from=build /opt/ddp-launch /opt/ddp-launch
COPY deploy/docker/service.sbom.json /usr/share/sbom/ddp-rendezvous.cdx.json
ENV PATH=/opt/ddp-launch/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 10001:10001
EXPOSE 29400 9400
# For container engines without their own probes. DDP_RENDEZVOUS_HTTP is the address; without it there is no check.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s \
    CMD ["python3", "-m", "rendezvous.service.probe"]
ENTRYPOINT ["ddp-rendezvous"]
CMD ["serve"]
