//! SQL over a run: every source row has one fate, the runner's own tables, files, scripts, and pixels beside losses.

use std::io::Write;
use std::process::Stdio;

use crate::project::{recipe, small, tiny_flux};
use crate::support::{Finished, Sandbox};

/// Twelve pictures, of which one is broken and one has no caption; batches of 4, so that some rows fill none; two samples
/// held out for validation.
fn mixed() -> Sandbox {
    let sandbox = small();
    sandbox.write("pictures/03.png", "not a picture");
    let text = recipe("pictures", &tiny_flux().to_string_lossy())
        .replace("[bucket]\n", "[bucket]\nbatch_size = 4\nremainder = \"drop\"\n")
        .replace("[generate]", "[train.validation]\ncount = 2\nevery_steps = 2\n\n[generate]");
    sandbox.write("small.toml", &text);
    let metadata = fs_err::read_to_string(sandbox.path("pictures/metadata.jsonl")).expect("metadata");
    let fewer: Vec<&str> = metadata.lines().filter(|line| !line.contains("05.png")).collect();
    sandbox.write("pictures/metadata.jsonl", &(fewer.join("\n") + "\n"));
    sandbox
}

fn sql(sandbox: &Sandbox, arguments: &[&str]) -> Finished {
    sandbox.pipeline(&[&["sql", "small.toml"], arguments].concat())
}

fn csv(sandbox: &Sandbox, query: &str) -> String {
    sql(sandbox, &[query, "--format", "csv"]).expect(0).stdout
}

#[test]
fn every_source_row_has_one_fate() {
    let sandbox = mixed();
    // However far a run went, its tables answer and it has a report.
    for until in ["ingest", "encode", "bucket", "train"] {
        let printed = sandbox.pipeline(&["run", "small.toml", "--until", until]).expect(0).text();
        assert!(!printed.contains("could not be written"), "{printed}");
        assert_eq!(csv(&sandbox, "select count(*) n from ledger"), "n\n12\n", "until {until}");
    }
    let fates = "select state, coalesce(stage, '-') stage, count(*) n from ledger group by 1, 2 order by 1, 2";
    // 12 source rows: 2 refused at once; of 10 latents, 2 fill no batch of 4; of 8 rows, 2 are held out.
    assert_eq!(csv(&sandbox, fates), "state,stage,n\nheld,bucket,2\nheld,train,2\nkept,-,6\nrejected,ingest,2\n");
    assert_eq!(csv(&sandbox, "select count(*) n, count(distinct source) s from ledger"), "n,s\n12,12\n");
    let rows_in = csv(&sandbox, "select rows_in from stages where stage = 'ingest'");
    assert_eq!(rows_in, "rows_in\n12\n", "the ledger has as many rows as the first stage was given");
    // What the runner counted is what the tables list.
    let counted = "select stage, rows_in, rows_out, rows_rejected, rows_held from stages where stage <> 'generate'";
    assert_eq!(
        csv(&sandbox, counted),
        "stage,rows_in,rows_out,rows_rejected,rows_held\ningest,12,10,2,0\nencode,10,10,0,0\nbucket,10,8,0,2\ntrain,8,6,0,2\n"
    );
    // Samples that were held out were not trained on, and all others were.
    let trained = "select count(*) n from ledger l join (select distinct sample_id from losses) t using (sample_id) where l.state = 'kept'";
    assert_eq!(csv(&sandbox, trained), "n\n6\n");
    // From the loss of a sample to its pixels.
    let pixels = "select s.bytes from (select sample_id, avg(loss) m from losses group by 1 order by m desc limit 1) l \
                  join samples s using (sample_id)";
    assert!(csv(&sandbox, pixels).starts_with("bytes\n89504e47"), "the picture's file itself");

    assert_eq!(csv(&sandbox, "select run, exit, made from runs"), "run,exit,made\n1,0,1\n2,0,1\n3,0,1\n4,0,1\n");
    let files = csv(&sandbox, "select count(*) n from files where stage = 'bucket' and path like 'shards/%.arrow'");
    assert_eq!(files, "n\n1\n");
    assert_eq!(csv(&sandbox, "select count(*) n from train.held"), "n\n2\n");

    // Formats and files.
    sql(&sandbox, &["select sample_id from samples", "--output", "ids.parquet"])
        .expect(0)
        .says(&["10 rows in ids.parquet"]);
    assert!(fs_err::read(sandbox.path("ids.parquet")).expect("a file").starts_with(b"PAR1"));
    let lines = sql(&sandbox, &["select source from samples order by 1", "--json"]).expect(0).stdout;
    assert_eq!((lines.lines().count(), lines.lines().next()), (10, Some(r#"{"source":"00.png"}"#)));
    sql(&sandbox, &["select 1", "--format", "parquet"])
        .expect(2)
        .says(&["Parquet is written to a file only", "--output"]);
    sql(&sandbox, &["select 1", "--output", "x.txt"]).expect(2).says(&["not known by its ending"]);
    sql(&sandbox, &["select 1", "--format", "jsn"])
        .expect(2)
        .says(&["unknown output format `jsn`", "did you mean `json`?"]);
    sql(&sandbox, &["select capton from samples"]).expect(2).says(&["no column `capton`", "caption"]);

    // A script on standard input, and what a bare call lists.
    let mut child = sandbox
        .command(&["sql", "small.toml", "--format", "csv"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("a started program");
    let script = b"\\d bucket.held\nselect ';' as s; -- a comment; or two\nselect count(*) as n\nfrom held;";
    child.stdin.take().expect("a pipe").write_all(script).expect("a script");
    let out = child.wait_with_output().expect("an end");
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    assert!(text.ends_with("s\n;\nn\n4\n") && text.starts_with("sample_id"), "{text}");
    sql(&sandbox, &[]).expect(0).says(&["ledger sample_id, source, state, stage, reason, detail", "stage_runs"]);
}

#[test]
fn a_condition_of_the_recipe_holds_samples_back_and_encodes_nothing_again() {
    let sandbox = small();
    sandbox.pipeline(&["run", "small.toml", "--until", "bucket"]).expect(0);
    let text = recipe("pictures", &tiny_flux().to_string_lossy());
    let condition = "where = \"caption not like '%number 3' and source <> '05.png' and scale <= 1\"";
    sandbox.write("small.toml", &text.replace("[bucket]\n", &format!("[bucket]\n{condition}\n")));
    sandbox
        .pipeline(&["plan", "small.toml", "--until", "bucket"])
        .expect(0)
        .says(&["2 samples held back", "small.toml:13"]);
    sandbox.pipeline(&["run", "small.toml", "--until", "train"]).expect(0).says(&["2 made, 2 cached", "2 held back"]);
    let held = "select s.source, h.reason from held h join samples s using (sample_id) order by 1";
    let said = csv(&sandbox, held);
    assert_eq!(said.lines().count(), 3, "{said}");
    assert!(said.contains("03.png,") && said.contains("05.png,") && said.contains("not where caption"), "{said}");
    let fates = "select state, coalesce(stage, '-') stage, count(*) n from ledger group by 1, 2 order by 1, 2";
    assert_eq!(csv(&sandbox, fates), "state,stage,n\nheld,bucket,2\nkept,-,10\n");
    let trained = "select count(distinct sample_id) n from losses";
    assert_eq!(csv(&sandbox, trained), "n\n10\n");

    sandbox.write("small.toml", &text.replace("[bucket]\n", "[bucket]\nwhere = \"capton = ''\"\n"));
    let wrong = ["no column `capton`", "did you mean `caption`?", "small.toml:13"];
    sandbox.pipeline(&["plan", "small.toml"]).expect(3).says(&wrong);
}
