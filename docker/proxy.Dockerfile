# The proxy before tritonserver. From the repository's root:
#   docker build -f docker/proxy.Dockerfile -t multilora:proxy .
ARG BASE_IMAGE=debian:bookworm-slim

FROM ${BASE_IMAGE}
RUN apt-get update \
 && apt-get install --yes --no-install-recommends libnginx-mod-http-js libnginx-mod-stream libnginx-mod-stream-js nginx \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin multilora \
 && install --directory --owner=10001 --group=10001 --mode=700 /secret
COPY docker/proxy/ /etc/multilora-proxy/
USER 10001:10001
EXPOSE 8080 8081 8082
HEALTHCHECK --interval=30s --timeout=10s CMD ["bash", "-c", ": < /dev/tcp/127.0.0.1/8081"]
# Answers that are under way are finished first.
STOPSIGNAL SIGQUIT
# Shared with the server, which reads it.
VOLUME /secret
ENTRYPOINT ["/etc/multilora-proxy/start"]
