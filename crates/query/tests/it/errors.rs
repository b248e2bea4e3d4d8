//! What a user gets wrong, and what is said then.

use query::{Error, Format, TableSource};

use crate::support::{Run, step};

fn said(error: &Error) -> String {
    use miette::Diagnostic;
    error.help().map_or_else(|| error.to_string(), |help| format!("{error}; {help}"))
}

#[test]
fn mistakes_are_explained() {
    let run = Run::new();
    for (sql, expected) in [
        (
            "select * from latent",
            "no table `latent`; did you mean `latents`? tables: `captions`, `latents`, `rejects`, `steps`",
        ),
        ("describe zebra", "no table `zebra`; tables: `captions`, `latents`, `rejects`, `steps`"),
        ("select los from steps", "no column `los`; did you mean `loss`?"),
        ("select s.los from steps s", "no column `s.los`; did you mean `s.loss`?"),
        ("", "the query is empty; such as `select count(*) from samples`"),
        (" ; ", "the query is empty; such as `select count(*) from samples`"),
        ("select 1; select 2", "the query has 2 statements; give one at a time"),
        (
            "drop table steps",
            "`drop` is not allowed: tables of a run are read-only; use `select`, `show tables`, `describe` or `explain`",
        ),
    ] {
        assert_eq!(said(&run.fail(sql)), expected, "{sql}");
    }
    let syntax = said(&run.fail("selec * from steps"));
    assert!(syntax.starts_with("the query is not valid SQL: expected: an SQL statement, found: selec"), "{syntax}");
    let syntax = said(&run.fail("select * from steps where"));
    assert!(syntax.starts_with("the query is not valid SQL: expected: an expression"), "{syntax}");
    let unknown = said(&run.fail("select tensor_men(latent) from latents"));
    assert!(unknown.starts_with("invalid function 'tensor_men'. Did you mean 'tensor_"), "{unknown}");
    let unknown = said(&run.fail("select zebra from steps"));
    assert!(unknown.starts_with("no column `zebra`; known names: `epoch`, `grad_norm`, `loss`"), "{unknown}");
    let unlike = said(&run.fail("select sum(text) from captions"));
    assert!(unlike.contains("sum"), "{unlike}");
}

#[test]
fn nothing_is_ever_written() {
    let run = Run::new();
    let target = run.folder.path().join("stolen.parquet");
    for sql in [
        format!("copy steps to '{}'", target.display()),
        format!("create external table x stored as parquet location '{}'", target.display()),
        "create table x as select * from steps".into(),
        "select * into x from steps".into(),
        "create view x as select 1".into(),
        "insert into steps select * from steps".into(),
        "delete from steps".into(),
        "update steps set loss = 0".into(),
        "set datafusion.execution.batch_size = 1".into(),
        "explain analyze insert into steps select * from steps".into(),
        "truncate table steps".into(),
        "prepare p as select 1".into(),
    ] {
        let error = run.fail(&sql);
        assert!(matches!(error, Error::ReadOnly(_) | Error::Failed(_)), "{sql}: {error:?}");
    }
    assert!(!target.exists());
    assert_eq!(run.number("select count(*) from steps"), 10.0);
    // A file is not a table.
    let path = run.folder.path().join("steps.parquet");
    assert!(matches!(run.fail(&format!("select * from '{}'", path.display())), Error::UnknownTable { .. }));
}

#[test]
fn a_bad_file_is_named() {
    let run = Run::new();
    let path = run.folder.path().join("steps.parquet");
    let whole = fs_err::read(&path).unwrap();
    fs_err::write(&path, &whole[..whole.len() / 2]).unwrap();
    let error = run.fail("select 1").to_string();
    assert!(
        error.starts_with("table `steps`: `") && error.contains("steps.parquet` is truncated, damaged or not Parquet"),
        "{error}"
    );
    let missing = TableSource::files("steps", vec![run.folder.path().join("nowhere.parquet")]);
    let error = query::run(&[missing], "select 1", Format::Csv, &mut Vec::new()).unwrap_err().to_string();
    assert!(error.contains("nowhere.parquet` cannot be opened"), "{error}");
}

#[test]
fn files_of_one_table_must_agree() {
    let run = Run::new();
    let other = run.folder.path().join("steps2.parquet");
    tables::write(
        &other,
        [tables::Loss { step: 1, epoch: 0, sample_id: "a".into(), sigma: 0.5, weight: 1.0, loss: 0.5, dropped: false }],
    )
    .unwrap();
    let table = TableSource::files("steps", vec![run.folder.path().join("steps.parquet"), other.clone()]);
    let error = query::run(&[table], "select 1", Format::Csv, &mut Vec::new()).unwrap_err().to_string();
    assert!(error.contains("steps2.parquet` has column `loss` of type `Float32`, which is `Float64` in `"), "{error}");

    // A column that only some files have is null in the others.
    tables::write(&other, [tables::Validation { step: 99, sigma: 0.5, loss: 0.25 }]).unwrap();
    let table = TableSource::files("steps", vec![run.folder.path().join("steps.parquet"), other]);
    let mut out = Vec::new();
    query::run(
        &[table],
        "select step, lr, sigma from steps where step in (9, 99) order by step",
        Format::Csv,
        &mut out,
    )
    .unwrap();
    assert_eq!(String::from_utf8(out).unwrap(), "step,lr,sigma\n9,0.00001,\n99,,0.5\n");
    assert_eq!(step(9, 0.0).lr, 1e-5);
}
