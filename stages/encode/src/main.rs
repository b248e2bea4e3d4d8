//! The program `pipeline-encode`.
fn main() -> std::process::ExitCode {
    stage::entry::<encode::Encode>()
}
