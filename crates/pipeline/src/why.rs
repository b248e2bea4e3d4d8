//! `pipeline explain`: why a stage runs or does not, down to the line of the recipe and the file of the data set; or what
//! became of one sample.

use std::fmt::Write as _;

use query::{Format, Session};
use serde_json::{Value, json};
use stage::Exit;

use crate::database;
use crate::error::{Error, Result, say};
use crate::explain::Change;
use crate::plan::{State, forecasts, states};
use crate::record::last_made;
use crate::selection::{Request, Selection};
use crate::show::current;
use crate::workspace::{Prepared, Workspace};

/// Explains the stage of that name, else the sample with that id or source.
pub(crate) fn print(workspace: &Workspace, subject: &str, json: bool) -> Result<()> {
    let out = if workspace.graph.node(subject).is_some() {
        stage(workspace, subject, json)?
    } else {
        sample(workspace, subject, json)?
    };
    say(&mut std::io::stdout(), &out);
    Ok(())
}

/// A stage and, as far as its inputs are to blame, the stages before it.
fn stage(workspace: &Workspace, name: &str, json: bool) -> Result<String> {
    let request = Request { until: vec![name.to_owned()], ..Request::default() };
    let selection = Selection::new(&workspace.graph, &workspace.recipe, &request)?;
    let stages = workspace.prepare(&selection.all, &selection.implied)?;
    let states = states(workspace, &selection, &stages)?;
    let forecasts = forecasts(workspace, &stages, &states);
    let (mut out, mut list) = (String::new(), Vec::new());
    for ((prepared, state), forecast) in stages.iter().zip(&states).zip(&forecasts).rev() {
        let own = prepared.node.name == name;
        if !own && matches!(state, State::Cached { .. } | State::Remote { .. }) {
            continue;
        }
        let changes = if let State::ToRun { changes, .. } = state { changes.as_slice() } else { &[] };
        let last = last_made(workspace, &prepared.node.name).map(|(record, _)| record);
        if json {
            list.push(json!({
                "stage": prepared.node.name, "state": word(state), "reason": reason(state), "changes": changes,
                "compared_with": last, "forecast": forecast,
            }));
            continue;
        }
        let _ = writeln!(out, "{} {}", prepared.node.name, sentence(prepared, state));
        for change in changes {
            tell(change, &mut out);
        }
        if let Some(record) = last {
            let _ = writeln!(out, "  last made or used {}, key {}", record.started, record.key.short());
        }
        if let Some(line) = forecast.as_ref().map(crate::forecast::Forecast::line).filter(|line| !line.is_empty()) {
            let _ = writeln!(out, "  to do: {line}");
        }
    }
    Ok(if json { format!("{}\n", json!(list)) } else { out })
}

fn word(state: &State) -> &'static str {
    match state {
        State::Cached { .. } => "cached",
        State::Remote { .. } => "remote",
        State::ToRun { .. } => "to_run",
        State::Waits { .. } => "waits",
    }
}

fn reason(state: &State) -> Option<&str> {
    if let State::ToRun { reason, .. } = state { Some(reason) } else { None }
}

fn sentence(stage: &Prepared, state: &State) -> String {
    match state {
        State::Cached { artifact } => {
            let on = [
                (!stage.checked.key.is_null()).then_some("its parameters"),
                (!stage.sources.is_empty()).then_some("its sources"),
                (!stage.node.inputs.is_empty()).then_some("its inputs"),
            ];
            let on: Vec<&str> = on.into_iter().flatten().chain(["its version"]).collect();
            format!("is cached: {} are those of {}", on.join(", "), artifact.manifest.key.short())
        }
        State::Remote { manifest } => format!("is in the remote: {}", manifest.key.short()),
        State::ToRun { changes, reason, .. } if changes.is_empty() => format!("runs: {reason}"),
        State::ToRun { changes, .. } => {
            format!("runs: {} thing{} changed", changes.len(), if changes.len() == 1 { "" } else { "s" })
        }
        State::Waits { on } => format!("waits for {}; whether it runs depends on what comes out", on.join(", ")),
    }
}

fn tell(change: &Change, out: &mut String) {
    let _ = writeln!(out, "  - {}", change.told());
    for file in change.files.iter().skip(3) {
        let _ = writeln!(out, "      {file}");
    }
}

/// Tables that know samples, with what of them is told.
const OF_SAMPLE: &[(&str, &str)] = &[
    ("ledger", "select * from ledger where sample_id in ({ids}) or source = {asked}"),
    (
        "samples",
        "select sample_id, source, media, width, height, caption, digest from samples where sample_id in ({ids})",
    ),
    (
        "latents",
        "select sample_id, bucket_width, bucket_height, scale, crop_left, crop_top, item_key from latents where sample_id in ({ids})",
    ),
    (
        "losses",
        "select sample_id, count(*) times_trained, avg(loss) mean_loss, min(step) first_step, max(step) last_step from losses where sample_id in ({ids}) group by sample_id",
    ),
];

fn sample(workspace: &Workspace, asked: &str, json: bool) -> Result<String> {
    let stages = current(workspace)?;
    let session = database::open(workspace, &stages)?;
    let quoted = format!("'{}'", asked.replace('\'', "''"));
    let ids = format!("select sample_id from samples where sample_id = {quoted} or source = {quoted}");
    let mut found = Vec::new();
    for (table, query) in OF_SAMPLE.iter().filter(|(table, _)| session.tables().contains(*table)) {
        let rows = ask(&session, &query.replace("{ids}", &ids).replace("{asked}", &quoted))?;
        found.push((*table, rows));
    }
    if found.iter().all(|(_, rows)| rows.is_empty()) {
        let stages: Vec<String> = workspace.graph.nodes().map(|node| format!("`{}`", node.name)).collect();
        return Err(Error::new(
            Exit::Usage,
            spec::Mistake::new(format!("`{asked}` is neither a stage nor a sample of this recipe's runs")).help(format!(
                "stages: {}; a sample is named by its `sample_id` or its `source`, as in `pipeline sql RECIPE \"select sample_id, source from samples\"`",
                stages.join(", ")
            )),
        ));
    }
    if json {
        return Ok(format!(
            "{}\n",
            Value::Object(found.into_iter().map(|(t, rows)| (t.to_owned(), json!(rows))).collect())
        ));
    }
    let mut out = String::new();
    for (table, rows) in found {
        for row in rows {
            let _ = writeln!(out, "{table}");
            for (name, value) in row.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null()) {
                let _ =
                    writeln!(out, "  {name:14} {}", value.as_str().map_or_else(|| value.to_string(), str::to_owned));
            }
        }
    }
    for stage in stages.iter().filter(|stage| !stage.fresh) {
        let when = stage.record.as_ref().map_or("never", |record| record.started.as_str());
        let _ = writeln!(out, "note: `{}` is of an earlier run ({when})", stage.stage);
    }
    Ok(out)
}

fn ask(session: &Session, sql: &str) -> Result<Vec<Value>> {
    let failed = |error: query::Error| Error::from_diagnostic(Exit::Failed, &error);
    let mut lines = Vec::new();
    let format: Format = "json".parse().map_err(failed)?;
    session.run(sql, format, &mut lines).map_err(failed)?;
    Ok(lines.split(|byte| *byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect())
}
