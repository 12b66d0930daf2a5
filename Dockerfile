# One file for the three services; each image holds one of them and what it needs:
#
#   docker build --build-arg SERVICE=executor -t chairlift-executor .
#
# router and scheduler are built without torch. The model is not in the image: mount it at /models. For a GPU:
#
#   docker build --build-arg SERVICE=executor --target executor-gpu -t chairlift-executor-gpu .
#
# which computes attention by our Triton kernels. With --build-arg EXTRAS=executor,gpu flash-attn is built and taken;
# BASE_IMAGE must then have CUDA's compiler beside Python.

ARG BASE_IMAGE=python:3.12-slim
ARG SERVICE=router

# --- install into a virtual environment, which is all that is taken over ---------------------------------
FROM ${BASE_IMAGE} AS build
ARG SERVICE
# A folder of wheels inside the build context for pip to look into beside its index, such as one with a CPU
# build of torch; with PIP_NO_INDEX=1 it looks nowhere else. LICENSE stands for none: COPY must copy something.
ARG WHEELS=LICENSE
ARG PIP_NO_INDEX
# What to install in place of what the service needs.
ARG EXTRAS=
WORKDIR /src
RUN python3 -m venv /opt/chairlift
COPY ${WHEELS} /wheels/
COPY pyproject.toml README.md LICENSE ./
COPY protos protos
COPY rpc rpc
COPY chairlift chairlift
COPY ${SERVICE} ${SERVICE}
# A router brings its HTTP door along; CHAIRLIFT_HTTP=0.0.0.0:8000 opens it. CHAIRLIFT_TRACES sends traces.
RUN extras="${EXTRAS:-${SERVICE}},tracing"; if [ "${SERVICE}" = router ]; then extras="${extras},http"; fi; \
    pip="/opt/chairlift/bin/pip install --no-cache-dir --find-links /wheels"; \
    case ",${extras}," in \
        *,gpu,*) $pip ".[executor]" hatchling ninja packaging psutil setuptools wheel && \
            pip="$pip --no-build-isolation" ;; \
    esac; \
    $pip ".[${extras}]"
# The executor's kernels for every instruction set: its image has no compiler, and chooses at its start.
RUN if [ "${SERVICE}" = executor ]; then \
        command -v g++ || { apt-get update && apt-get install --yes --no-install-recommends g++; } && \
        CHAIRLIFT_CACHE_DIR=/opt/chairlift/kernels /opt/chairlift/bin/python -m executor.kernels; \
    fi

# --- what every service's image is ----------------------------------------------------------------------
FROM ${BASE_IMAGE} AS base
RUN useradd --system --uid 10001 --no-create-home chairlift
COPY --from=build /opt/chairlift /opt/chairlift
ENV PATH=/opt/chairlift/bin:$PATH PYTHONUNBUFFERED=1
USER chairlift
WORKDIR /
STOPSIGNAL SIGTERM

FROM base AS router
EXPOSE 50051
ENV CHAIRLIFT_LISTEN=0.0.0.0:50051
HEALTHCHECK --interval=5s --timeout=5s --start-period=30s CMD ["python", "-m", "rpc.health_probe", "127.0.0.1:50051"]
ENTRYPOINT ["python", "-m", "router"]

FROM base AS scheduler
# Where schedulers may share a lease: a volume that is new takes over this folder's owner.
USER root
RUN install --directory --owner chairlift /lease
USER chairlift
EXPOSE 50052
ENV CHAIRLIFT_LISTEN=0.0.0.0:50052
HEALTHCHECK --interval=5s --timeout=5s --start-period=30s CMD ["python", "-m", "rpc.health_probe", "127.0.0.1:50052"]
ENTRYPOINT ["python", "-m", "scheduler"]

FROM base AS executor
EXPOSE 50053
ENV CHAIRLIFT_LISTEN=0.0.0.0:50053 CHAIRLIFT_CACHE_DIR=/opt/chairlift/kernels
HEALTHCHECK --interval=5s --timeout=5s --start-period=120s CMD ["python", "-m", "rpc.health_probe", "127.0.0.1:50053"]
ENTRYPOINT ["python", "-m", "executor"]

FROM executor AS executor-gpu
# Triton compiles a few lines of C for each kernel that it starts.
USER root
RUN command -v gcc || { apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && \
    rm -rf /var/lib/apt/lists/*; }
USER chairlift
ENV CHAIRLIFT_DEVICE=cuda TRITON_CACHE_DIR=/tmp/triton

FROM ${SERVICE}
