//! Answers: formats, order, several files, empty tables, rows of the runner's own.

use query::{Column, Format, Session, TableSource};
use serde_json::{Value, json};

use crate::support::Run;

#[test]
fn a_grid_is_short() {
    let run = Run::new();
    let sql = "select sample_id, bucket_width w, latent, embedding, pooled from latents, captions order by 1";
    let expected = "\
+-----------+----+-------------------------------------------+--------------------------------------+--------+
| sample_id | w  | latent                                    | embedding                            | pooled |
+-----------+----+-------------------------------------------+--------------------------------------+--------+
| a         | 32 | f16[12] 0.5000, 3.0234, 3.2285, …         | bf16[12] 0.5000, 3.0312, 3.2344, …   | NULL   |
| b         | 32 | f16[12] -2.3770, -0.3381, 2.4707, …       | bf16[12] 0.5000, 3.0312, 3.2344, …   | NULL   |
| c         | 16 | [NaN, 1, 1, 1, 1, 1]                      | bf16[12] 0.5000, 3.0312, 3.2344, …   | NULL   |
+-----------+----+-------------------------------------------+--------------------------------------+--------+
";
    let squeeze = |text: &str| {
        text.lines()
            .map(|l| l.split_whitespace().collect::<Vec<_>>().join(" "))
            .filter(|l| !l.starts_with('+'))
            .collect::<Vec<_>>()
    };
    assert_eq!(squeeze(&run.ask(sql, Format::Table)), squeeze(expected));
}

#[test]
fn csv_and_json_are_whole() {
    let run = Run::new();
    let sql = "select sample_id, latent from latents where sample_id = 'c'";
    assert_eq!(run.ask(sql, Format::Csv), "sample_id,latent\nc,\"[NaN, 1, 1, 1, 1, 1]\"\n");
    assert_eq!(run.ask(sql, Format::Json), "[\n{\"sample_id\":\"c\",\"latent\":[null,1.0,1.0,1.0,1.0,1.0]}\n]\n");
    let two = "select a.step, b.step, b.loss from steps a, steps b where a.step = 1 and b.step = 3";
    assert_eq!(run.ask(two, Format::Json), "[\n{\"step\":1,\"step_2\":3,\"loss\":0.25}\n]\n");
    assert_eq!(run.ask(two, Format::Csv), "step,step,loss\n1,3,0.25\n");
    let hex = "select embedding, pooled from captions";
    let json: Value = serde_json::from_str(&run.ask(hex, Format::Json)).unwrap();
    assert_eq!((json[0]["embedding"].as_str().unwrap().len(), &json[0]["pooled"]), (48, &Value::Null));
}

#[test]
fn rows_come_in_file_order_and_answers_repeat() {
    let run = Run::new();
    let sql = "select sample_id from latents";
    assert_eq!(run.ask(sql, Format::Csv), "sample_id\nc\na\nb\n");
    let sum = "select sum(loss), stddev(loss), avg(lr) from steps";
    assert_eq!(run.ask(sum, Format::Csv), run.ask(sum, Format::Csv));
    let harmonic: f64 = (1..=10).map(|i| 1.0 / f64::from(i)).sum();
    assert!((run.number("select sum(loss) from steps") - harmonic).abs() < 1e-14);
}

#[test]
fn sql_is_sql() {
    let run = Run::new();
    for (sql, expected) in [
        ("select count(*) as n from latents", "n\n3\n"),
        ("SELECT bucket_width, count(*) AS n FROM Latents GROUP BY 1 ORDER BY 1;", "bucket_width,n\n16,1\n32,2\n"),
        ("with s as (select * from steps where step > 7) select max(step) - min(step) as d from s", "d\n1\n"),
        ("select text like '%x%' as l, length(text) as n from captions", "l,n\ntrue,1\n"),
        (
            "select epoch, round(avg(loss), 3) as m from steps group by epoch order by epoch",
            "epoch,m\n0,0.611\n1,0.206\n2,0.126\n3,0.1\n",
        ),
        (
            "select l.sample_id from latents l join captions c on l.caption_digest = c.caption_digest where c.text = 'x' order by 1 limit 1",
            "sample_id\na\n",
        ),
        ("select '' as empty, null as nothing", "empty,nothing\n,\n"),
        ("show tables", "table_name\ncaptions\nlatents\nrejects\nsteps\n"),
    ] {
        assert_eq!(run.ask(sql, Format::Csv), expected, "{sql}");
    }
    assert!(run.ask("describe steps", Format::Csv).contains("grad_norm,Float64,NO"));
    assert!(run.ask("explain select * from steps", Format::Csv).contains("TableScan"));
    assert!(run.ask("show columns from steps", Format::Csv).contains("grad_norm"));
}

#[test]
fn a_table_without_files_has_its_columns_and_no_rows() {
    let run = Run::new();
    let header = "sample_id,source,stage,reason,detail\n";
    assert_eq!(run.ask("select * from rejects", Format::Csv), header);
    assert_eq!(run.ask("select * from rejects", Format::Json), "[\n]\n");
    assert!(
        run.ask("select * from rejects", Format::Table).contains("| sample_id | source | stage | reason | detail |")
    );
    let session = Session::new(&run.tables()).unwrap();
    assert!(!session.tables().contains("unheard_of"));
}

#[test]
fn rows_of_the_runner_are_a_table() {
    let columns =
        [("stage", Column::Text), ("rows", Column::Integer), ("seconds", Column::Float), ("cached", Column::Boolean)];
    let rows = [json!({"stage": "ingest", "rows": 78, "seconds": 0.5, "cached": true}), json!({"stage": "train"})];
    let table = TableSource::rows("stages", &columns, &rows).unwrap();
    let mut out = Vec::new();
    let n = query::run(&[table], "select * from stages", Format::Csv, &mut out).unwrap();
    assert_eq!(
        (n, String::from_utf8(out).unwrap().as_str()),
        (2, "stage,rows,seconds,cached\ningest,78,0.5,true\ntrain,,,\n")
    );
    assert!(
        TableSource::rows("stages", &columns, &[json!({"rows": "many"})]).unwrap_err().to_string().contains("`stages`")
    );
    let empty = TableSource::rows("stages", &columns, &[]).unwrap();
    let mut out = Vec::new();
    assert_eq!(query::run(&[empty], "select stage from stages", Format::Csv, &mut out).unwrap(), 0);
}

#[test]
fn a_glob_finds_files_at_any_depth_it_names() {
    let run = Run::new();
    let files = |glob: &str| {
        let table = TableSource::glob("latents", run.folder.path(), glob).unwrap();
        let mut out = Vec::new();
        query::run(&[table], "select count(*) from latents", Format::Csv, &mut out).unwrap();
        String::from_utf8(out).unwrap().lines().nth(1).unwrap().to_owned()
    };
    for (glob, rows) in [
        ("latents/**/*.parquet", "3"),
        ("**/latents/32x24/part-*.parquet", "2"),
        ("latents/16*/part-00000.parquet", "1"),
        ("latents/*.parquet", "0"),
    ] {
        assert_eq!(files(glob), rows, "{glob}");
    }
}

#[test]
fn a_closed_pipe_is_an_error_not_a_panic() {
    struct Closed;
    impl std::io::Write for Closed {
        fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
            Err(std::io::ErrorKind::BrokenPipe.into())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Err(std::io::ErrorKind::BrokenPipe.into())
        }
    }
    let run = Run::new();
    for format in [Format::Table, Format::Csv, Format::Json] {
        let error = query::run(&run.tables(), "select * from steps", format, &mut Closed).unwrap_err();
        assert!(
            matches!(&error, query::Error::Output(e) if e.kind() == std::io::ErrorKind::BrokenPipe),
            "{format:?}: {error}"
        );
    }
}
