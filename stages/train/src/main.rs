//! `pipeline-train`.

fn main() -> std::process::ExitCode {
    stage::entry::<train::Train>()
}
