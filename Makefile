# Two commands: `make tarot` shows the whole job on this machine, `make test` passes the tests.
SHELL := bash
.PHONY: tarot test lint build deps packages

tarot: build                  ## draw a small deck, encode, bucket, train and generate; no network model, no GPU
	@target/debug/draw-deck --scenes 78 runs/deck-with-scenes
	target/debug/pipeline run recipes/tarot-mini.toml

test: build                   ## every test, on the real programs
	cargo test --workspace

lint: deps                    ## format, clippy and docs, warnings denied
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --quiet -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --document-private-items --quiet

build: deps
	cargo build --workspace --bins

deps: packages libtorch/build-version

packages:
	@scripts/system-packages.sh

libtorch/build-version: scripts/fetch-libtorch.sh scripts/libtorch.txt
	scripts/fetch-libtorch.sh libtorch
