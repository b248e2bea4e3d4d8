//! What a person or a program sees while a run goes on: bars on a terminal, plain lines elsewhere, JSON lines on demand.
//!
//! Results go to standard output, progress to standard error.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::{Value, json};
use stage::Event;

use crate::clock::{size, told};
use crate::error::say;
use crate::resources::Resources;

/// Without a terminal, a phase that takes long gets one line per interval.
const LINE_INTERVAL: Duration = Duration::from_secs(10);
/// So many refused items of a stage are shown one by one; all are in its `rejects` table.
const REJECTED_SHOWN: u64 = 5;
/// Notes of a stage that are printed one by one when it runs.
const NOTES_SHOWN: usize = 4;

/// How the artifacts of a run came about.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Ends {
    pub(crate) made: usize,
    pub(crate) fetched: usize,
    pub(crate) cached: usize,
}

enum Mode {
    Terminal,
    Plain,
    Json,
}

/// Shows a run. Stages that run at the same time have a bar each; lines name their stage.
pub(crate) struct Reporter {
    mode: Mode,
    /// Width of the column of stage names.
    width: usize,
    bars: MultiProgress,
    running: BTreeMap<String, Running>,
}

/// A stage that runs.
#[derive(Default)]
struct Running {
    bar: Option<ProgressBar>,
    phase: Option<Phase>,
    rejected: u64,
    /// Folder that it fills, and the link to it.
    fills: (PathBuf, PathBuf),
}

/// The phase that is going on, for rate and ETA.
struct Phase {
    name: String,
    started: Instant,
    first: u64,
    last_line: Instant,
}

impl Reporter {
    pub(crate) fn new(json: bool, names: impl Iterator<Item = usize>) -> Self {
        let mode = match (json, std::io::stderr().is_terminal()) {
            (true, _) => Mode::Json,
            (false, true) => Mode::Terminal,
            (false, false) => Mode::Plain,
        };
        let bars = MultiProgress::with_draw_target(ProgressDrawTarget::stderr());
        Self { mode, width: names.max().unwrap_or(0), bars, running: BTreeMap::new() }
    }

    /// A stage whose result is there.
    pub(crate) fn cached(&mut self, stage: &str, rows: u64, link: &Path, key: &store::Digest) {
        let text = format!("{stage:w$}  cached   {rows} rows  {}", link.display(), w = self.width);
        self.result(&text, || json!({"event": "stage", "stage": stage, "status": "cached", "key": key, "path": link}));
    }

    /// A stage begins.
    pub(crate) fn begins(&mut self, stage: &str, reason: &str, resources: &Resources, notes: &[String]) {
        self.running.insert(stage.to_owned(), Running::default());
        let Resources { device, ranks, .. } = resources;
        let shared = if *ranks > 1 { format!("; on {ranks} ranks") } else { String::new() };
        let text = format!("{stage:w$}  running  {reason}{shared}", w = self.width);
        self.aside(&text, || {
            json!({"event": "stage", "stage": stage, "status": "running", "reason": reason, "device": device, "ranks": ranks, "notes": notes})
        });
        if !matches!(self.mode, Mode::Json) {
            let (shown, more) = notes.split_at(notes.len().min(NOTES_SHOWN));
            for note in shown {
                self.line(&format!("{:w$}  note: {note}", "", w = self.width));
            }
            if !more.is_empty() {
                let text = format!("and {} more notes; `pipeline plan` shows all", more.len());
                self.line(&format!("{:w$}  {text}", "", w = self.width));
            }
        }
    }

    /// The folder that a running stage fills, and the link by which people are told of its files.
    pub(crate) fn fills(&mut self, stage: &str, folder: &Path, link: &Path) {
        if let Some(running) = self.running.get_mut(stage) {
            running.fills = (folder.to_owned(), link.to_owned());
        }
    }

    /// Another runner has the lock.
    pub(crate) fn waits(&mut self, stage: &str) {
        let text = format!("{stage:w$}  waiting  for another runner that makes the same", w = self.width);
        self.aside(&text, || json!({"event": "stage", "stage": stage, "status": "waiting"}));
    }

    /// An artifact begins to come from a remote.
    pub(crate) fn fetches(&mut self, stage: &str, bytes: u64, remote: &str) {
        self.running.insert(stage.to_owned(), Running::default());
        let text = format!("{stage:w$}  fetching {} at most from {remote}", size(bytes), w = self.width);
        self.aside(
            &text,
            || json!({"event": "stage", "stage": stage, "status": "fetching", "bytes": bytes, "remote": remote}),
        );
    }

    /// It is here.
    pub(crate) fn fetched(&mut self, stage: &str, seconds: f64, artifact: &store::Artifact) {
        self.ends_running(stage);
        let (key, bytes) = (artifact.manifest.key, artifact.manifest.bytes());
        let text = format!("{stage:w$}  fetched  {} in {}", size(bytes), told(seconds), w = self.width);
        self.aside(
            &text,
            || json!({"event": "stage", "stage": stage, "status": "fetched", "seconds": seconds, "key": key}),
        );
    }

    /// An artifact is in a remote, of which so much was sent now.
    pub(crate) fn pushed(&mut self, stage: &str, files: usize, bytes: u64, remote: &str) {
        self.ends_running(stage);
        let text = format!("{stage:w$}  pushed   {files} files, {} to {remote}", size(bytes), w = self.width);
        self.aside(
            &text,
            || json!({"event": "pushed", "stage": stage, "files": files, "bytes": bytes, "remote": remote}),
        );
    }

    /// A stage is done.
    pub(crate) fn made(&mut self, stage: &str, seconds: f64, summary: &str, link: &Path, key: &store::Digest) {
        self.ends_running(stage);
        let text = format!("{stage:w$}  made in {}: {summary}  {}", told(seconds), link.display(), w = self.width);
        self.result(&text, || {
            json!({"event": "stage", "stage": stage, "status": "made", "seconds": seconds, "summary": summary, "key": key, "path": link})
        });
    }

    /// The stage ended badly; the error itself is printed by the caller.
    pub(crate) fn failed(&mut self, stage: &str, status: &str) {
        self.ends_running(stage);
        if let Mode::Json = self.mode {
            self.json(&json!({"event": "stage", "stage": stage, "status": status}));
        }
    }

    /// The last line of a good run.
    pub(crate) fn ends(&mut self, ends: Ends, seconds: f64) {
        let Ends { made, fetched, cached } = ends;
        let text = match (made, fetched, cached) {
            (0, 0, 1) => "nothing to do: the stage is cached".to_owned(),
            (0, 0, n) => format!("nothing to do: all {n} stages are cached"),
            _ => {
                let parts = [(made, "made"), (fetched, "fetched"), (cached, "cached")];
                let told = parts.iter().filter(|(n, _)| *n > 0).map(|(n, word)| format!("{n} {word}"));
                format!("done: {}", told.collect::<Vec<_>>().join(", "))
            }
        };
        self.result(&format!("{text} ({})", told(seconds)), || {
            json!({"event": "end", "made": made, "fetched": fetched, "cached": cached, "seconds": seconds, "exit": 0})
        });
    }

    /// Where the run's page lies.
    pub(crate) fn report(&mut self, path: &Path) {
        let text = format!("report: {}", path.display());
        self.result(&text, || json!({"event": "report", "path": path}));
    }

    /// Something about the run as a whole that a person should know.
    pub(crate) fn note(&mut self, message: &str) {
        self.aside(&format!("note: {message}"), || json!({"event": "warning", "message": message}));
    }

    /// An event of a running stage.
    pub(crate) fn event(&mut self, stage: &str, event: &Event) {
        if let Mode::Json = self.mode {
            let mut value = json!(event);
            value["stage"] = Value::from(stage);
            self.json(&value);
            return;
        }
        let Some(running) = self.running.get_mut(stage) else { return };
        match event {
            Event::Progress { phase, done, total, unit, note } => {
                self.progress(stage, phase, *done, *total, unit, note.as_deref());
            }
            Event::Warning { message } => self.line(&format!("{stage:w$}  warning: {message}", w = self.width)),
            Event::Rejected { item, reason, detail } => {
                running.rejected += 1;
                let rejected = running.rejected;
                if rejected <= REJECTED_SHOWN {
                    self.line(&format!("{stage:w$}  refused {item}: {reason}: {detail}", w = self.width));
                } else if rejected == REJECTED_SHOWN + 1 {
                    let text = "more is refused; `pipeline sql RECIPE \"select * from rejects\"` shows all at the end";
                    self.line(&format!("{stage:w$}  {text}", w = self.width));
                }
            }
            Event::Output { label, path } => {
                let (folder, link) = &running.fills;
                let path = path.strip_prefix(folder).map_or_else(|_| path.clone(), |inside| link.join(inside));
                self.line(&format!("{stage:w$}  {label}: {}", path.display(), w = self.width));
            }
            // Numbers are in the artifact's tables; the ends of a stage are reported by the runner.
            Event::Metric { .. } | Event::Done { .. } | Event::Failed { .. } => {}
        }
    }

    fn progress(&mut self, stage: &str, name: &str, done: u64, total: Option<u64>, unit: &str, note: Option<&str>) {
        let now = Instant::now();
        let Some(running) = self.running.get_mut(stage) else { return };
        if running.phase.as_ref().is_none_or(|phase| phase.name != name) {
            running.end_bar(&self.bars);
            running.phase = Some(Phase { name: name.to_owned(), started: now, first: done, last_line: now });
        }
        let Some(phase) = &mut running.phase else { return };
        let text = progress_text(done, total, unit, note, done.saturating_sub(phase.first), phase.started.elapsed());
        let finished = total == Some(done);
        match self.mode {
            Mode::Terminal => {
                let bar = running.bar.get_or_insert_with(|| self.bars.add(new_bar(stage, self.width, name, total)));
                bar.set_position(done);
                bar.set_message(text);
                if finished {
                    running.end_bar(&self.bars);
                }
            }
            Mode::Plain if finished || now - phase.last_line >= LINE_INTERVAL => {
                phase.last_line = now;
                self.line(&format!("{stage:w$}  {name}  {text}", w = self.width));
            }
            Mode::Plain | Mode::Json => {}
        }
    }

    fn ends_running(&mut self, stage: &str) {
        if let Some(mut running) = self.running.remove(stage) {
            running.end_bar(&self.bars);
        }
    }

    /// A line about the result: standard output.
    fn result(&mut self, text: &str, value: impl FnOnce() -> Value) {
        match self.mode {
            Mode::Json => self.json(&value()),
            Mode::Terminal | Mode::Plain => {
                self.bars.suspend(|| say(&mut std::io::stdout(), &format!("{text}\n")));
            }
        }
    }

    /// A line about the way to it: standard error.
    fn aside(&mut self, text: &str, value: impl FnOnce() -> Value) {
        match self.mode {
            Mode::Json => self.json(&value()),
            Mode::Terminal | Mode::Plain => self.line(text),
        }
    }

    fn line(&self, text: &str) {
        self.bars.suspend(|| say(&mut std::io::stderr(), &format!("{text}\n")));
    }

    #[expect(clippy::unused_self, reason = "called like its siblings")]
    fn json(&self, value: &Value) {
        say(&mut std::io::stdout(), &format!("{value}\n"));
    }
}

impl Running {
    fn end_bar(&mut self, bars: &MultiProgress) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
            bars.remove(&bar);
        }
    }
}

fn new_bar(stage: &str, width: usize, phase: &str, total: Option<u64>) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(total, ProgressDrawTarget::hidden());
    let template = if total.is_some() { "{prefix} {bar:24} {msg}" } else { "{prefix} {spinner} {msg}" };
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style.progress_chars("━╸─"));
    }
    bar.with_prefix(format!("{stage:width$}  {phase}"))
}

/// `12/78 pictures  3.4/s  ETA 20 s  loss 0.41`; the rate is that of this run's share (`since` units in `elapsed`).
fn progress_text(
    done: u64,
    total: Option<u64>,
    unit: &str,
    note: Option<&str>,
    since: u64,
    elapsed: Duration,
) -> String {
    let mut text = match total {
        Some(total) => format!("{done}/{total} {unit}"),
        None => format!("{done} {unit}"),
    };
    let rate = since as f64 / elapsed.as_secs_f64().max(1e-9);
    if since > 0 && elapsed >= Duration::from_millis(200) {
        let digits = usize::from(rate < 10.0) + usize::from(rate < 1.0);
        let _ = write!(text, "  {rate:.digits$}/s");
        if let Some(left) = total.and_then(|total| total.checked_sub(done)).filter(|left| *left > 0) {
            let _ = write!(text, "  ETA {}", told(left as f64 / rate));
        }
    }
    if let Some(note) = note {
        let _ = write!(text, "  {note}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_and_eta_count_only_what_this_run_did() {
        let text = |since| progress_text(150, Some(200), "steps", Some("loss 0.41"), since, Duration::from_secs(100));
        // Resumed at step 100: 50 steps in 100 s, not 150.
        assert_eq!(text(50), "150/200 steps  0.50/s  ETA 1 min 40 s  loss 0.41");
        assert_eq!(text(0), "150/200 steps  loss 0.41");
        assert_eq!(progress_text(7, None, "files", None, 7, Duration::from_millis(100)), "7 files");
    }
}
