# Two stages: the program is built with the whole toolchain and runs with nothing but itself, as nobody.

FROM rust:1.88-bookworm AS build
WORKDIR /src
COPY Cargo.toml Cargo.lock ./
COPY src src
COPY sql sql
COPY config config
COPY benches benches
RUN cargo build --locked --release --bin hapax

FROM debian:bookworm-slim
# The authorities that are trusted where TLS to a store names no others; this image comes without.
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
COPY --from=build /src/target/release/hapax /usr/local/bin/hapax
USER 65534:65534
# Providers; operators.
EXPOSE 8080 9090
ENV HAPAX_CONFIG=/etc/hapax/hapax.toml
HEALTHCHECK --interval=5s --timeout=3s --start-period=10s CMD ["hapax", "ready"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["hapax"]
CMD ["serve"]
