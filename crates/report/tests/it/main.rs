//! Claims about the page as a file: what it holds, what it can never do, and how large it can get.

#![expect(clippy::unwrap_used, reason = "a test that cannot set up its world has failed")]

use std::path::PathBuf;

use query::{Session, TableSource};
use report::{Artifact, Ledger, Run, Stage, Status};
use tables::{ImageRow, Loss, Reject, Row, Sample, Step, Validation};

struct Project {
    folder: tempfile::TempDir,
    tables: Vec<TableSource>,
}

impl Project {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap(), tables: Vec::new() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn table<R: Row>(&mut self, rows: impl IntoIterator<Item = R>) {
        let path = self.path(R::TABLE).with_extension("parquet");
        tables::write(&path, rows).unwrap();
        self.tables.push(TableSource::files(R::TABLE, vec![path]));
    }

    fn page(&self, run: &Run) -> String {
        let page = report::page(run, &Session::new(&self.tables).unwrap());
        assert!(is_closed(&page), "a page loads nothing and runs nothing");
        page
    }
}

/// No scripts, no handlers, and every address is data inside the page.
fn is_closed(page: &str) -> bool {
    let lower = page.to_lowercase();
    let addresses = ["src=\"", "href=\"", "url("];
    let outside = addresses.iter().any(|start| lower.split(start).skip(1).any(|rest| !rest.starts_with("data:")));
    let handlers = lower.split('<').any(|tag| {
        let tag = tag.split('>').next().unwrap_or_default();
        let outside_quotes: String = tag.split('"').step_by(2).collect();
        outside_quotes.contains(" on") || outside_quotes.starts_with("script")
    });
    !outside && !handlers
}

fn run(stages: Vec<Stage>) -> Run {
    Run {
        recipe: "demo".into(),
        number: 3,
        started: "2026-01-02T03:04:05Z".into(),
        exit: Some(0),
        stages,
        ..Run::default()
    }
}

fn made(name: &str, inputs: &[&str]) -> Stage {
    Stage {
        name: name.into(),
        inputs: inputs.iter().map(|from| ("rows".to_owned(), (*from).to_owned())).collect(),
        status: Status::Made,
        key: "abcdef0123456789".into(),
        result: Some(Artifact { ledger: Ledger { taken: 5, out: 3, rejected: 1, held: 1 }, ..Artifact::default() }),
        ..Stage::default()
    }
}

fn picture(width: u32, height: u32) -> Vec<u8> {
    media::encode_png(&media::Picture::filled(width, height, [200, 30, 40]), &[]).unwrap()
}

fn sample(n: usize, caption: &str, bytes: Vec<u8>) -> Sample {
    Sample {
        sample_id: format!("id{n}"),
        source: format!("{n}.png"),
        media: "png".into(),
        width: 64,
        height: 128,
        frames: 1,
        fps: None,
        caption: caption.into(),
        digest: "0".into(),
        bytes,
    }
}

fn step(step: i64) -> Step {
    let loss = 1.0 + 1.0 / (step + 1) as f64;
    Step { step, epoch: step / 100, loss, lr: 1e-4, grad_norm: 0.5, samples: 4, seconds: 0.1, memory_bytes: 1 << 20 }
}

fn loss(step: i64, sample: i64, loss: f32) -> Loss {
    let sigma = (step % 10) as f32 / 10.0 + 0.05;
    Loss { step, epoch: 0, sample_id: format!("id{sample}"), sigma, weight: 1.0, loss, dropped: false }
}

#[test]
fn a_run_without_any_table_has_a_page() {
    let mut stage = Stage { name: "dig".into(), status: Status::Failed, ..Stage::default() };
    stage.error = Some("the furnace is cold".into());
    let mut run = run(vec![
        stage,
        Stage { name: "smelt".into(), inputs: vec![("ore".into(), "dig".into())], ..Stage::default() },
    ]);
    run.exit = Some(4);
    let page = Project::new().page(&run);
    for part in ["failed", "the furnace is cold", "not run", "viewport", "prefers-color-scheme"] {
        assert!(page.contains(part), "`{part}` is not in the page");
    }
    assert!(!page.contains("<h2>Training</h2>") && !page.contains("<h2>Samples</h2>"));
}

#[test]
fn captions_cannot_leave_their_place() {
    let hostile = "\"><script>alert(1)</script><img src=x onerror=alert(2)>&amp; \u{202e}cba {braces} {{x}}";
    let mut project = Project::new();
    project.table([sample(1, hostile, picture(64, 128)), sample(2, "broken", b"no picture".to_vec())]);
    project.table([Reject {
        sample_id: None,
        source: hostile.into(),
        stage: hostile.into(),
        reason: hostile.into(),
        detail: hostile.into(),
    }]);
    let mut stage = made("ingest", &[]);
    stage.warnings = vec![hostile.into()];
    stage.result.as_mut().unwrap().parameters = serde_json::json!({ hostile: hostile });
    let mut run = run(vec![stage]);
    (run.recipe, run.text, run.overrides) = (hostile.into(), hostile.into(), vec![hostile.into()]);
    let page = project.page(&run);
    assert!(page.contains("&lt;script&gt;alert(1)&lt;/script&gt;"), "it is shown as text");
    assert!(!page.contains('\u{202e}'));
    assert!(page.contains("data:image/jpeg;base64,") && page.contains("class=\"nopicture\""));
}

#[test]
fn what_the_tables_hold_is_on_the_page() {
    let mut project = Project::new();
    project.table((0..5).map(|n| sample(n, "a caption of a card", picture(40, 80))));
    project.table((0..40).map(step));
    // Sample 3 loses 0.5 more than the others at every noise level.
    project.table((0..40).flat_map(|s| (0..5).map(move |n| loss(s, n, if n == 3 { 1.5 } else { 1.0 }))));
    project.table(
        (0..4).flat_map(|r| [0.2, 0.8].map(|sigma| Validation { step: r * 10, sigma, loss: 1.0 / (r + 1) as f64 })),
    );
    project.table([Reject {
        sample_id: None,
        source: "x.png".into(),
        stage: "ingest".into(),
        reason: "decode".into(),
        detail: "cut off".into(),
    }]);
    let folder = project.path("artifact");
    fs_err::create_dir_all(folder.join("samples/step_9")).unwrap();
    for file in ["000.png", "samples/step_9/000.png", "style_grid.png", "contact_sheet.png"] {
        fs_err::write(folder.join(file), picture(32, 64)).unwrap();
    }
    project.table([ImageRow {
        file: "000.png".into(),
        prompt: "a lighthouse".into(),
        negative_prompt: None,
        seed: 7,
        width: 32,
        height: 64,
        frames: 1,
        fps: None,
        steps: 4,
        guidance: 3.5,
        guidance_2: None,
        true_cfg: None,
        lora: None,
        lora_scale: None,
        style: None,
        checkpoint: "c".into(),
    }]);
    let mut generate = made("generate", &["train"]);
    let result = generate.result.as_mut().unwrap();
    result.path.clone_from(&folder);
    result.files =
        ["000.png", "contact_sheet.png", "samples/step_9/000.png", "style_grid.png"].map(str::to_owned).to_vec();
    let page = project.page(&run(vec![made("ingest", &[]), made("train", &["ingest"]), generate]));
    let parts = [
        "<strong>Loss</strong>",
        "<strong>Loss by noise level</strong>",
        "<strong>Validation loss</strong>",
        "Learning rate",
        "Gradient norm",
        "after step 9",
        "a lighthouse",
        "seed 7",
        "style_grid.png",
        "decode",
        "x.png",
        "cut off",
        "Hardest to learn",
        "a caption of a card",
    ];
    for part in parts {
        assert!(page.contains(part), "`{part}` is not in the page");
    }
    assert!(!page.contains("contact_sheet.png"), "it repeats pictures that are there");
    // The mean over five samples is 1.1; the hard one stands 0.4 above it at every noise level.
    assert!(page.contains("+0.400 over 40 draws"), "the hardest sample comes with its excess loss");
    assert_eq!(page.matches("<path class=\"edge\"").count(), 2);
}

#[test]
fn a_page_stays_small_whatever_the_tables_hold() {
    let mut project = Project::new();
    project.table((0..60_000).map(step));
    project.table((0..50_000).map(|n| loss(n, n, 1.0)));
    project.table((0..20_000).map(|n| Validation { step: n, sigma: (n % 7) as f32 / 7.0, loss: 1.0 }));
    project.table((0..3_000).map(|n| Reject {
        sample_id: None,
        source: "long ".repeat(200),
        stage: "ingest".into(),
        reason: format!("reason {n}"),
        detail: "detail ".repeat(500),
    }));
    project.table((0..300).map(|n| sample(n, &"words ".repeat(2000), picture(300, 300))));
    let mut stages: Vec<Stage> = (0..60).map(|n| made(&format!("s{n}"), &[])).collect();
    for stage in &mut stages {
        stage.warnings = vec!["w".repeat(5000); 40];
        stage.result.as_mut().unwrap().info = serde_json::json!(vec!["x"; 100_000]);
    }
    let page = project.page(&run(stages));
    assert!(page.len() < 8 << 20, "{} bytes", page.len());
}

#[test]
fn a_table_with_foreign_columns_is_told_and_the_rest_is_there() {
    let mut project = Project::new();
    let rows = [serde_json::json!({"step": 1, "energy": 2.0})];
    let columns = [("step", query::Column::Integer), ("energy", query::Column::Float)];
    project.tables.push(TableSource::rows("steps", &columns, &rows).unwrap());
    let page = project.page(&run(vec![made("simulate", &[])]));
    assert!(page.contains("leaves out `steps`: no column"), "{}", page.split("callout").nth(1).unwrap_or(&page));
    assert!(page.contains("simulate"));
}
