# Everything that a newcomer needs: `make demo` shows it, `make run` keeps it running, `make test` proves it.

.DEFAULT_GOAL := help
.PHONY: help setup setup-test demo run test bench

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## Install what is missing: PostgreSQL, Redis, a C compiler
	@script/setup

setup-test: # And what only the tests need: pgbouncer, docker-compose, Python with providers' libraries
	@script/setup test

demo: setup ## Start everything, show a webhook and its duplicates, stop
	cargo run --locked --release -- dev --once

run: setup ## Start private stores and a gateway, until Ctrl-C
	cargo run --locked --release -- dev

test: setup-test ## Formatting, lints, documentation, benches once, all tests
	cargo fmt --check
	cargo clippy --locked --all-targets -- -D warnings
	RUSTDOCFLAGS=-Dwarnings cargo doc --locked --no-deps
	cargo test --locked --benches
	cargo test --locked --doc
	cargo test --locked --lib --bins --tests

bench: setup ## Measure: each stage by itself, isolation of sources, crossing locks, deleting, side by side with other receivers
	cargo bench --locked --bench stages
	cargo bench --locked --bench isolation
	cargo bench --locked --bench deadlock
	cargo bench --locked --bench purge
	cargo bench --locked --bench side_by_side -- --core
