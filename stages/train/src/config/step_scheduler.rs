//! `step_scheduler`: how many samples a step takes, how many steps a run, and when checkpoints are written.

use serde::Serialize;
use serde_json::json;
use spec::Problem;

use super::reader::Block;

/// The block, with the peer's defaults for what it leaves out.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct StepScheduler {
    /// Samples of an optimizer step.
    pub(crate) global_batch_size: u64,
    /// Samples that go through the model at once. Not part of the key: gradients are the mean over the global batch.
    #[serde(skip)]
    pub(crate) local_batch_size: u64,
    pub(crate) num_epochs: Option<u64>,
    pub(crate) max_steps: Option<u64>,
    /// `None`: at the end of every epoch.
    pub(crate) ckpt_every_steps: Option<u64>,
    pub(crate) save_checkpoint_every_epoch: bool,
}

impl StepScheduler {
    pub(crate) fn read(mut block: Block<'_>) -> Self {
        let epochs_given = block.has("num_epochs");
        let max_steps = block.positive("max_steps");
        let num_epochs = block.positive("num_epochs");
        let every_given = block.has("ckpt_every_steps") || block.is_null("ckpt_every_steps");
        let scheduler = Self {
            global_batch_size: block.positive("global_batch_size").unwrap_or(32),
            local_batch_size: block.positive("local_batch_size").unwrap_or(1),
            num_epochs: if epochs_given || max_steps.is_some() { num_epochs } else { Some(10) },
            max_steps,
            ckpt_every_steps: block.positive("ckpt_every_steps").or((!every_given).then_some(100)),
            save_checkpoint_every_epoch: block.flag("save_checkpoint_every_epoch").unwrap_or(true),
        };
        let (global, local) = (scheduler.global_batch_size, scheduler.local_batch_size);
        if global % local != 0 {
            let message = format!(
                "`step_scheduler.global_batch_size` is {global}, which `local_batch_size` {local} does not divide"
            );
            let help = format!(
                "set `global_batch_size` to {} or `local_batch_size` to a divisor of {global}",
                global.div_ceil(local) * local
            );
            block.problem("global_batch_size", Problem::new(message).help(help));
        }
        block.without_effect(
            "log_remote_every_steps",
            &[json!(1)],
            "every step is reported and goes to the `steps` table",
        );
        block.without_effect(
            "loss_average_window_steps",
            &[],
            "the `steps` table has every step; average it as you like",
        );
        block.without_effect("val_every_steps", &[], "set `validation.every_steps`");
        block.without_effect("validate_on_checkpoint", &[json!(false), json!(true)], "set `validation.every_steps`");
        block.without_effect("gc_every_steps", &[], "there is no garbage collector");
        block.without_effect(
            "preemption_signal",
            &[json!("SIGTERM"), json!(15)],
            "SIGTERM and SIGINT both lead to a checkpoint at the next step",
        );
        for key in ["start_step", "start_epoch"] {
            block.without_effect(key, &[json!(0)], "a run goes on from its checkpoint, which knows its step");
        }
        block.finish();
        scheduler
    }

    /// Steps of the whole run, for epochs of `epoch_len` steps.
    pub(crate) fn total_steps(&self, epoch_len: u64) -> u64 {
        let by_epochs = self.num_epochs.map(|epochs| epochs.saturating_mul(epoch_len));
        [by_epochs, self.max_steps].into_iter().flatten().min().unwrap_or(epoch_len)
    }

    /// Whether a checkpoint follows step `step` of `total`.
    pub(crate) fn checkpoint_after(&self, step: u64, epoch_len: u64, total: u64) -> bool {
        let epoch_ends = (step + 1).is_multiple_of(epoch_len);
        let by_steps = self.ckpt_every_steps.is_some_and(|every| (step + 1).is_multiple_of(every));
        let by_epoch = epoch_ends && (self.save_checkpoint_every_epoch || self.ckpt_every_steps.is_none());
        by_steps || by_epoch || step + 1 == total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scheduler() -> StepScheduler {
        StepScheduler {
            global_batch_size: 32,
            local_batch_size: 4,
            num_epochs: Some(5000),
            max_steps: Some(200),
            ckpt_every_steps: Some(100),
            save_checkpoint_every_epoch: false,
        }
    }

    #[test]
    fn the_shorter_of_epochs_and_steps_ends_the_run() {
        assert_eq!(scheduler().total_steps(3), 200);
        assert_eq!(StepScheduler { num_epochs: Some(2), ..scheduler() }.total_steps(3), 6);
        assert_eq!(StepScheduler { num_epochs: None, ..scheduler() }.total_steps(3), 200);
    }

    #[test]
    fn checkpoints_follow_the_peers_rule() {
        let at = |s: &StepScheduler| (0..200).filter(|step| s.checkpoint_after(*step, 3, 200)).collect::<Vec<_>>();
        assert_eq!(at(&scheduler()), [99, 199]);
        assert_eq!(at(&StepScheduler { ckpt_every_steps: Some(150), ..scheduler() }), [149, 199]);
        let every_epoch =
            StepScheduler { save_checkpoint_every_epoch: true, ckpt_every_steps: Some(1000), ..scheduler() };
        assert_eq!(at(&every_epoch)[..3], [2, 5, 8]);
    }
}
