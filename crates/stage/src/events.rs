//! The reporting side of a stage: JSON lines on standard output, and the wish to stop that comes back.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::{Event, Failure};

/// Progress events are sent at most this often per phase.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// Handle to report with; clones share one stream, so any thread may hold one.
#[derive(Clone)]
pub struct Events {
    sink: Arc<Mutex<Sink>>,
    /// Whether anything but a failure is told: one rank speaks for all.
    speaks: bool,
    stop: Arc<AtomicBool>,
}

struct Sink {
    out: Box<dyn Write + Send>,
    last: Option<(String, Instant)>,
    /// The newest progress that the rate limit held back.
    pending: Option<Event>,
}

impl Events {
    /// Events on standard output, stopped by SIGINT and SIGTERM; a second signal ends the process at once.
    /// Unless this process `speaks`, only its failure is sent.
    pub(crate) fn stdout(speaks: bool) -> io::Result<Self> {
        let events = Self { speaks, ..Self::to(Box::new(io::stdout())) };
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
            signal_hook::flag::register_conditional_shutdown(
                signal,
                crate::Exit::Interrupted.code(),
                Arc::clone(&events.stop),
            )?;
            signal_hook::flag::register(signal, Arc::clone(&events.stop))?;
        }
        Ok(events)
    }

    /// Events to any writer, one JSON object a line; for tests of stages.
    pub fn to(out: Box<dyn Write + Send>) -> Self {
        Self {
            sink: Arc::new(Mutex::new(Sink { out, last: None, pending: None })),
            speaks: true,
            stop: Arc::new(AtomicBool::new(false)),
        }
    }

    /// Whether SIGINT or SIGTERM came, or nobody listens any more: stop at the next clean point.
    pub fn interrupted(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Asks the stage to stop, as a signal would.
    pub fn interrupt(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// `Err` as soon as [`Events::interrupted`] holds; `kept` says what a rerun continues from.
    pub fn check_interrupted(&self, kept: &str) -> Result<(), Failure> {
        if self.interrupted() { Err(Failure::interrupted(kept)) } else { Ok(()) }
    }

    /// Work done so far in a phase. Call it as often as you like: it is rate-limited, and the last one is always sent.
    pub fn progress(&self, phase: &str, done: u64, total: Option<u64>, unit: &str, note: Option<String>) {
        let event = Event::Progress { phase: phase.to_owned(), done, total, unit: unit.to_owned(), note };
        let mut sink = self.lock();
        let now = Instant::now();
        match &sink.last {
            Some((last, at)) if last == phase && Some(done) != total && now - *at < PROGRESS_INTERVAL => {
                sink.pending = Some(event);
                return;
            }
            // The same phase goes on: the newer number replaces the one held back.
            Some((last, _)) if last == phase => sink.pending = None,
            _ => self.flush_pending(&mut sink),
        }
        sink.last = Some((phase.to_owned(), now));
        self.write(&mut sink, &event);
    }

    /// Named numbers at a step (from 0).
    pub fn metric(&self, step: u64, values: &[(&str, f64)]) {
        let values: BTreeMap<String, f64> = values.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
        self.send(&Event::Metric { step, values });
    }

    /// Something a person should know; the run goes on.
    pub fn warning(&self, message: impl Into<String>) {
        self.send(&Event::Warning { message: message.into() });
    }

    /// A refused item; its row must be in the artifact's `rejects` table, too.
    pub fn rejected(&self, item: impl Into<String>, reason: impl Into<String>, detail: impl Into<String>) {
        self.send(&Event::Rejected { item: item.into(), reason: reason.into(), detail: detail.into() });
    }

    /// A file a person may want to open now.
    pub fn output(&self, label: impl Into<String>, path: impl Into<PathBuf>) {
        self.send(&Event::Output { label: label.into(), path: path.into() });
    }

    /// Sends any event, after the progress held back before it.
    pub(crate) fn send(&self, event: &Event) {
        let mut sink = self.lock();
        self.flush_pending(&mut sink);
        self.write(&mut sink, event);
    }

    fn flush_pending(&self, sink: &mut Sink) {
        if let Some(event) = sink.pending.take() {
            self.write(sink, &event);
        }
    }

    fn write(&self, sink: &mut Sink, event: &Event) {
        if !self.speaks && !matches!(event, Event::Failed { .. }) {
            return;
        }
        // Non-finite metrics have no JSON form; serde_json writes them as `null`, which the reader takes for NaN.
        let written = serde_json::to_vec(event).map_err(io::Error::from).and_then(|mut line| {
            line.push(b'\n');
            sink.out.write_all(&line)?;
            sink.out.flush()
        });
        if written.is_err() {
            // The runner is gone: nobody would publish what comes out.
            self.interrupt();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Sink> {
        self.sink.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Default)]
    struct Shared(Arc<Mutex<Vec<u8>>>);
    impl Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    impl Shared {
        fn events(&self) -> Vec<Event> {
            let bytes = self.0.lock().unwrap().clone();
            bytes.split(|b| *b == b'\n').filter(|l| !l.is_empty()).map(|l| serde_json::from_slice(l).unwrap()).collect()
        }
    }

    fn done(event: &Event) -> Option<u64> {
        match event {
            Event::Progress { done, .. } => Some(*done),
            _ => None,
        }
    }

    #[test]
    fn the_last_progress_of_a_phase_is_always_sent() {
        let out = Shared::default();
        let events = Events::to(Box::new(out.clone()));
        for n in 0..50 {
            events.progress("a", n, None, "rows", None);
        }
        events.progress("b", 1, Some(2), "rows", None);
        events.progress("b", 2, Some(2), "rows", None);
        events.warning("end");
        let seen: Vec<_> = out.events().iter().filter_map(done).collect();
        assert!(seen.len() < 20, "{seen:?}");
        assert_eq!(seen[seen.len() - 3..], [49, 1, 2]);
        assert!(matches!(out.events().last(), Some(Event::Warning { .. })));
    }

    #[test]
    fn a_rank_that_does_not_speak_tells_its_failure_only() {
        let out = Shared::default();
        let events = Events { speaks: false, ..Events::to(Box::new(out.clone())) };
        events.progress("a", 1, Some(2), "rows", None);
        events.warning("as every rank");
        events.send(&Event::Failed { problem: spec::Problem::new("x"), exit: 1 });
        assert!(matches!(out.events().as_slice(), [Event::Failed { .. }]));
    }

    #[test]
    fn a_closed_pipe_asks_the_stage_to_stop() {
        struct Closed;
        impl Write for Closed {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let events = Events::to(Box::new(Closed));
        assert!(!events.interrupted());
        events.warning("anyone?");
        assert!(events.interrupted());
        assert_eq!(events.check_interrupted("nothing").unwrap_err().exit, crate::Exit::Interrupted);
    }
}
