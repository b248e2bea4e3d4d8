//! A stage that failed for a reason that may pass starts again, from what it saved; if it then comes no further, on fewer
//! ranks.

use stage::Exit;

use crate::error::Result;
use crate::spawn::{Ended, Failed};
use crate::workspace::{Prepared, Workspace};

/// How one run of a stage may start again.
pub(crate) struct Restarts<'a> {
    workspace: &'a Workspace,
    stage: &'a Prepared,
    /// Processes of the present try.
    pub(crate) ranks: usize,
    /// What became of the tries before, for people.
    pub(crate) told: Vec<String>,
    /// How far the last try came.
    reached: Option<u64>,
}

impl<'a> Restarts<'a> {
    pub(crate) fn new(workspace: &'a Workspace, stage: &'a Prepared) -> Self {
        Self { workspace, stage, ranks: stage.resources.ranks, told: Vec::new(), reached: None }
    }

    /// Whether the stage is to start once more after a try that ended so, and what to tell about it.
    pub(crate) fn again(&mut self, ended: &Ended) -> Result<Option<String>> {
        let most = self.workspace.options.max_restarts;
        let Err(Failed { problem, exit }) = &ended.outcome else { return Ok(None) };
        let may_pass = matches!(exit, Exit::Failed | Exit::Lost) && self.stage.description.resumable;
        if !may_pass || self.told.len() >= most {
            return Ok(None);
        }
        let reached = ended.progress.map_or(0, |(done, _)| done);
        let no_further = self.reached.is_some_and(|before| reached <= before);
        self.reached = Some(reached);
        if no_further {
            self.ranks = self.fewer()?.unwrap_or(self.ranks);
        }
        let (count, ranks) = (self.told.len() + 1, self.stage.resources.ranks);
        let on = if ranks == 1 { String::new() } else { format!(" on {}", spec::counted(self.ranks, "rank")) };
        let text = format!("`{}` failed: {}; restart {count} of {most}{on}", self.stage.node.name, problem.message);
        self.told.push(text.clone());
        Ok(Some(text))
    }

    /// The next smaller number of ranks that is allowed and that the stage can run on.
    fn fewer(&self) -> Result<Option<usize>> {
        let least = self.workspace.options.min_ranks.unwrap_or(self.stage.resources.ranks);
        for ranks in (least..self.ranks).rev() {
            if self.workspace.runs_on(self.stage, ranks)? {
                return Ok(Some(ranks));
            }
        }
        Ok(None)
    }
}
