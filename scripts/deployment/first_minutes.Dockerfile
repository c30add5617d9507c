# A newcomer's machine, for scripts/run try_first_minutes.
ARG BASE_IMAGE
FROM ${BASE_IMAGE}
ARG PACKAGES
RUN apt-get update && apt-get install --yes --no-install-recommends ${PACKAGES}
