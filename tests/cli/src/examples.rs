//! The stage in Python of `examples/`: one table of the graph makes it a stage like ours.

use crate::project::small;
use crate::support::{Finished, Sandbox, workspace};

/// The small project with the example's graph and program, and a recipe that asks for it.
fn judged() -> Sandbox {
    let sandbox = small();
    for name in ["pipeline.toml", "pipeline-judge"] {
        fs_err::copy(workspace().join("examples/judge").join(name), sandbox.path(name)).expect("a copy");
    }
    set_contrast(&sandbox, "0");
    sandbox
}

fn set_contrast(sandbox: &Sandbox, least: &str) {
    let text = fs_err::read_to_string(sandbox.path("small.toml")).expect("a recipe");
    let text = text.split("\n[judge]").next().expect("a part").to_owned();
    sandbox.write("small.toml", &format!("{text}\n[judge]\nmin_contrast = {least}\n"));
}

fn ask(sandbox: &Sandbox, query: &str) -> String {
    let Finished { stdout, .. } = sandbox.pipeline(&["sql", "small.toml", query, "--format", "csv"]).expect(0);
    stdout
}

#[test]
fn the_example_s_graph_is_ours_and_one_table() {
    let read = |path: &str| fs_err::read_to_string(workspace().join(path)).expect("a graph");
    let (ours, theirs) = (read("pipeline.toml"), read("examples/judge/pipeline.toml"));
    let more = theirs.strip_prefix(ours.as_str()).expect("the example begins with our graph, word for word");
    assert_eq!(more.matches("[stage.").count(), 1);
}

#[test]
fn a_stage_in_python_is_a_stage() {
    let sandbox = judged();
    sandbox.pipeline(&["run", "small.toml"]).expect(0).says(&["judge", "2 of 2 pictures are good"]);
    let scores = ask(&sandbox, "select contrast from scores join images using (file) order by 1");
    let scores: Vec<f64> = scores.lines().skip(1).map(|line| line.parse().expect("a number")).collect();
    assert!(scores.len() == 2 && scores[0] > 0.0 && scores[0] < scores[1] && scores[1] <= 0.5, "{scores:?}");

    // Between the two scores: one is refused, and nothing before it runs again.
    set_contrast(&sandbox, &f64::midpoint(scores[0], scores[1]).to_string());
    sandbox.pipeline(&["plan", "small.toml"]).expect(0).says(&["judge to run", "min_contrast"]);
    sandbox.pipeline(&["run", "small.toml"]).expect(0).says(&["1 of 2 pictures are good", "1 made, 5 cached", "blank"]);
    let rows = "select rows_in, rows_out, rows_rejected from stages where stage = 'judge'";
    assert_eq!(ask(&sandbox, rows), "rows_in,rows_out,rows_rejected\n2,1,1\n");
    assert_eq!(
        ask(&sandbox, "select stage, reason, count(*) n from rejects group by 1, 2"),
        "stage,reason,n\njudge,blank,1\n"
    );
    assert_eq!(ask(&sandbox, "select count(*) n from judge.rejects where detail like 'contrast%'"), "n\n1\n");
    // A sample's fate is none of its business.
    assert_eq!(ask(&sandbox, "select state, count(*) n from ledger group by 1"), "state,n\nkept,12\n");
    let page = fs_err::read_to_string(sandbox.path("runs/small/report.html")).expect("a page");
    assert!(page.contains("judge") && page.contains("blank") && page.contains("contrast 0."));
    sandbox.pipeline(&["run", "small.toml"]).expect(0).says(&["nothing to do: all 6 stages are cached"]);
}

#[test]
fn its_mistakes_are_placed_like_ours() {
    let sandbox = judged();
    set_contrast(&sandbox, "2.5");
    sandbox.pipeline(&["plan", "small.toml"]).expect(3).says(&["min_contrast", "small.toml:"]);
    let graph = fs_err::read_to_string(sandbox.path("pipeline.toml")).expect("a graph");
    set_contrast(&sandbox, "0");
    sandbox.write("pipeline.toml", &graph.replace("pictures = \"generate\"", "pictures = \"train\""));
    let wrong =
        ["`judge` takes `pictures` as `pictures`, but `train` makes `checkpoint`", "the wrong kind of artifact"];
    sandbox.pipeline(&["plan", "small.toml"]).expect(3).says(&wrong);
    sandbox.write("pipeline.toml", &graph.replace("pictures = \"generate\"", "picture = \"generate\""));
    sandbox.pipeline(&["plan", "small.toml"]).expect(3).says(&["has no input `picture`", "did you mean `pictures`?"]);
}
