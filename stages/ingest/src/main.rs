//! `pipeline-ingest`: see the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    stage::entry::<ingest::Ingest>()
}
