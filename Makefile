# Two commands: `make tarot` shows the whole job on this machine, `make test` passes the tests.
SHELL := bash
.NOTPARALLEL:
.PHONY: tarot test lint build deps packages

DECK := runs/deck-with-scenes

tarot: build $(DECK)/metadata.jsonl   ## draw a small deck, encode, bucket, train and generate; no network model, no GPU
	target/debug/pipeline run recipes/tarot-mini.toml

$(DECK)/metadata.jsonl: target/debug/draw-deck
	@target/debug/draw-deck --scenes 78 $(DECK)

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
