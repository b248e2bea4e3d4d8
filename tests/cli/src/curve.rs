//! The whole job reproduces a stored curve: whatever moves a number of ingest, encode, bucket or train by accident shows here.

use crate::project::small;
use crate::support::workspace;

/// Where it lies. `CURVE=write cargo test -p cli-tests curve` writes it anew; the commit says why it moved.
const CURVE: &str = "tests/cli/golden/small.csv";

/// Of the value, that CPUs may differ by in a latent rounded to bf16 the other way, and what comes of it.
const MOST: f64 = 1e-3;

#[test]
fn the_small_job_has_the_stored_curve() {
    let sandbox = small();
    let exact = ["--set", "encode.dtype=float32", "--set", "train.model.compute_dtype=float32"];
    sandbox.pipeline(&[&["run", "small.toml", "--until", "train"], &exact[..]].concat()).expect(0);
    let query = "select step, loss, lr, grad_norm, samples from steps order by step";
    let sql = ["sql", "small.toml", query, "--format", "csv"];
    let found = sandbox.pipeline(&[&sql, &exact[..]].concat()).expect(0).stdout;
    let path = workspace().join(CURVE);
    if std::env::var_os("CURVE").is_some_and(|value| value == "write") {
        fs_err::write(&path, &found).expect("a written file");
    }
    let stored = fs_err::read_to_string(path).expect("a stored curve");
    let rows = |text: &str| -> Vec<Vec<f64>> {
        let numbers = |line: &str| line.split(',').map(|value| value.parse().expect("a number")).collect();
        text.lines().skip(1).map(numbers).collect()
    };
    let (found, stored) = (rows(&found), rows(&stored));
    assert_eq!((found.len(), stored.len()), (4, 4));
    for (found, stored) in found.iter().zip(&stored) {
        for (a, b) in found.iter().zip(stored) {
            assert!((a - b).abs() <= MOST * b.abs(), "{found:?}, stored {stored:?}");
        }
    }
}
