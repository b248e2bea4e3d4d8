//! Answers that are larger than memory, answers in files, and tables by stage.

use arrow::array::AsArray;
use arrow::datatypes::Int64Type;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use query::{Column, Error, Format, Session, TableSource};
use serde_json::json;
use tables::{Held, Reject, write};

use crate::support::Run;

/// A table of about 60 MB in memory: 30 000 rows with a detail of 2 kB.
fn large(folder: &std::path::Path) -> TableSource {
    let path = folder.join("rejects.parquet");
    let row = |n: u32| Reject {
        sample_id: Some(format!("{:08x}", n.wrapping_mul(2_654_435_761))),
        source: n.to_string(),
        stage: "ingest".into(),
        reason: "large".into(),
        detail: format!("{n:08}").repeat(256),
    };
    write(&path, (0..30_000).map(row)).unwrap();
    TableSource::files("rejects", vec![path])
}

/// Counts what is written.
struct Count(u64);

impl std::io::Write for Count {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0 += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_table_larger_than_memory_is_answered_with_the_disk_s_help() {
    let folder = tempfile::tempdir().unwrap();
    let session = Session::with_memory(&[large(folder.path())], 24 << 20).unwrap();
    // Streamed: nothing is held but the batch at hand.
    for format in [Format::Csv, Format::Jsonl, Format::Json, Format::Table] {
        let mut out = Count(0);
        assert_eq!(session.run("select * from rejects", format, &mut out).unwrap(), 30_000);
        assert!(out.0 > 60_000_000, "{format:?}: {}", out.0);
    }
    // Sorted: runs are spilled to temporary files and merged.
    let path = folder.path().join("sorted.parquet");
    let sql = "select sample_id, detail from rejects order by sample_id";
    assert_eq!(session.save(sql, Format::Parquet, &path).unwrap(), 30_000);
    let mut last = String::new();
    for batch in ParquetRecordBatchReaderBuilder::try_new(fs_err::File::open(&path).unwrap().into_file())
        .unwrap()
        .build()
        .unwrap()
    {
        for id in batch.unwrap().column(0).as_string::<i32>().iter().flatten() {
            assert!(last.as_str() < id);
            id.clone_into(&mut last);
        }
    }
    // Held as a whole by its nature: refused in words, not killed.
    let error = session.rows::<serde_json::Value>("select array_agg(detail) from rejects").unwrap_err();
    assert!(matches!(error, Error::Memory), "{error}");
}

#[test]
fn an_answer_goes_into_a_file_that_appears_when_it_is_whole() {
    let run = Run::new();
    let session = Session::new(&run.tables()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let sql = "select a.step, b.step, a.loss from steps a join steps b on a.step = b.step order by a.step";
    for (format, ending) in [(Format::Csv, "csv"), (Format::Jsonl, "jsonl"), (Format::Parquet, "parquet")] {
        let path = folder.path().join("answer").with_extension(ending);
        assert_eq!(Format::of_path(&path), Some(format));
        assert_eq!(session.save(sql, format, &path).unwrap(), 10);
        assert!(session.save("select no_such from steps", format, &folder.path().join("other")).is_err());
    }
    assert_eq!(fs_err::read_dir(folder.path()).unwrap().count(), 3, "a failed answer leaves no file");
    let jsonl = fs_err::read_to_string(folder.path().join("answer.jsonl")).unwrap();
    assert_eq!(jsonl.lines().next(), Some(r#"{"step":0,"step_2":0,"loss":1.0}"#));
    assert_eq!(jsonl.lines().count(), 10);
    let file = fs_err::File::open(folder.path().join("answer.parquet")).unwrap().into_file();
    let batch = ParquetRecordBatchReaderBuilder::try_new(file).unwrap().build().unwrap().next().unwrap().unwrap();
    assert_eq!(batch.column_by_name("step_2").unwrap().as_primitive::<Int64Type>().value(9), 9);
    assert!(matches!(session.run(sql, Format::Parquet, &mut Vec::new()), Err(Error::ParquetNeedsFile)));
}

#[test]
fn tables_of_stages_and_views_are_tables() {
    let folder = tempfile::tempdir().unwrap();
    let held = |stage: &str, ids: &[&str]| {
        let path = folder.path().join(stage);
        let row = |id: &&str| Held { sample_id: (*id).into(), bucket: "8x8".into(), reason: stage.into() };
        write(&path, ids.iter().map(row)).unwrap();
        TableSource::files("held", vec![path]).of(stage)
    };
    let runs = TableSource::rows("runs", &[("n", Column::Integer)], &[json!({"n": 1})]).unwrap();
    let mut session = Session::new(&[held("bucket", &["a"]), held("odd \"name\"", &["b", "c"]), runs]).unwrap();
    let ask = |session: &Session, sql: &str| {
        let mut out = Vec::new();
        session.run(sql, Format::Csv, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    };
    assert_eq!(ask(&session, "select sample_id from bucket.held"), "sample_id\na\n");
    assert_eq!(ask(&session, "select count(*) n from \"odd \"\"name\"\"\".held"), "n\n2\n");
    session
        .view("everyone", "select sample_id from bucket.held union all select sample_id from \"odd \"\"name\"\"\".held")
        .unwrap();
    assert_eq!(ask(&session, "select count(*) n from everyone, runs"), "n\n3\n");
    assert_eq!(session.columns("everyone").unwrap()[0].name, "sample_id");
    assert_eq!(session.columns("bucket.held").unwrap().len(), 3);
    assert_eq!(ask(&session, "show tables"), "table_name\neveryone\nruns\n");
    let error = session.columns("bucket.hold").unwrap_err();
    let help = miette::Diagnostic::help(&error).unwrap().to_string();
    assert!(help.starts_with("did you mean `bucket.held`?"), "{help}");
}

#[test]
fn json_lines_of_a_stage_without_parquet_are_rows_like_others() {
    let folder = tempfile::tempdir().unwrap();
    let parquet = folder.path().join("rejects.parquet");
    let reject = |stage: &str| Reject {
        sample_id: None,
        source: "a".into(),
        stage: stage.into(),
        reason: "r".into(),
        detail: "d".into(),
    };
    write(&parquet, [reject("ingest")]).unwrap();
    let lines = folder.path().join("rejects.jsonl");
    let line = json!({"source": "b", "stage": "judge", "reason": "blank", "detail": ""});
    fs_err::write(&lines, format!("{line}\n{line}\n")).unwrap();
    let scores = folder.path().join("scores.jsonl");
    fs_err::write(&scores, "{\"file\": \"x.png\", \"score\": 0.5}\n{\"file\": \"y.png\", \"score\": 2}\n").unwrap();
    let tables = [
        TableSource::files("rejects", vec![parquet, lines.clone()]),
        TableSource::files("rejects", vec![lines]).of("judge"),
        TableSource::files("scores", vec![scores.clone()]),
    ];
    let session = Session::new(&tables).unwrap();
    let ask = |sql: &str| {
        let mut out = Vec::new();
        session.run(sql, Format::Csv, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    };
    let by_stage = "select stage, count(*) n from rejects group by 1 order by 1";
    assert_eq!(ask(by_stage), "stage,n\ningest,1\njudge,2\n");
    assert_eq!(ask("select sample_id, source from judge.rejects limit 1"), "sample_id,source\n,b\n");
    assert_eq!(ask("select sum(score) s from scores"), "s\n2.5\n");
    fs_err::write(&scores, "{\"file\": \"x.png\"\n").unwrap();
    let error = Session::new(&[TableSource::files("scores", vec![scores])]).err().unwrap();
    assert!(error.to_string().contains("scores.jsonl` cannot be read as JSON Lines"), "{error}");
}
