//! `pipeline-bucket`.

fn main() -> std::process::ExitCode {
    stage::entry::<bucket::Bucketing>()
}
