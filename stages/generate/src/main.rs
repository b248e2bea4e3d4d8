//! The program `pipeline-generate`.
fn main() -> std::process::ExitCode {
    stage::entry::<generate::Generate>()
}
