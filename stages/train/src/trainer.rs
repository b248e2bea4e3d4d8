//! The loop: plan, steps, records, validation, pictures, checkpoints; from the start or from the last checkpoint.

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Instant;

use models::ModelFolder;
use nn::rng::Stream;
use parallel::Team;
use serde_json::json;
use spec::{Launch, Problem, counted};
use stage::{Exit, Failure, Ledger, Outcome, SourceKind, Work};
use tables::{Held, Loss, Step};

use crate::batch::Recipe;
use crate::checkpoint::{self, Checkpoint};
use crate::config::{self, Config, Loaded, Rates, Validation};
use crate::dataset::Dataset;
use crate::draft::{Advance, Draft, Origin, Writing};
use crate::experts::Expert;
use crate::plan::{Item, Plan, Rule};
use crate::prefetch::{Piece, Pieces, Ranks, with_pieces};
use crate::preview::Preview;
use crate::records::Records;
use crate::session::Session;
use crate::step::{Accumulation, Stepped};
use crate::{Train, between_ranks, check, experts, unusable, validate};

/// Trains, as one rank of `launch`; see [`crate`].
pub(crate) fn run(work: &Work<Train>, launch: &Launch) -> Result<Outcome, Failure> {
    let request = &work.request;
    torch::device::set_threads(request.threads);
    let device = torch::device::resolve(&own_device(&request.device, launch)?).map_err(unusable)?;
    let loaded = configuration(work)?;
    let config = &loaded.config;
    let input = |name: &str| {
        let missing = || Failure::new(Exit::Usage, Problem::new(format!("the request has no input `{name}`")));
        request.inputs.get(name).ok_or_else(missing)
    };
    let dataset = Dataset::open(input("shards")?, input("captions")?)?;
    let (folder, immutable) = model_folder(work)?;
    let folder = ModelFolder::open(folder).map_err(unusable)?;
    fits(&loaded, launch, &folder)?;
    let team = join(config, launch, device)?;
    work.events.progress("loading the model", 0, None, "", None);
    let mut session = Session::build(config, folder, device, team)?;
    let resumed = resume(work, config, &mut session)?;
    let run = Run::new(work, config, &dataset, &session, immutable)?;
    run.agree(&session, &resumed)?;
    let outcome = run.train(&mut session, resumed)?;
    session.team.leave().map_err(between_ranks)?;
    Ok(outcome)
}

/// The device of this rank: of several on one host each takes a GPU.
fn own_device(asked: &str, launch: &Launch) -> Result<String, Failure> {
    match asked.split_once(':') {
        None if asked == "cuda" && launch.world > 1 => Ok(format!("cuda:{}", launch.local_rank)),
        Some(("cuda", _)) if launch.local_world > 1 => {
            let problem = Problem::new(format!("`{asked}` is one GPU for {} ranks of this host", launch.local_world));
            Err(Failure::new(Exit::Recipe, problem.help("write `cuda`: each rank takes the GPU of its number")))
        }
        _ => Ok(asked.to_owned()),
    }
}

/// Meets the other ranks.
fn join(config: &Config, launch: &Launch, device: tch::Device) -> Result<Team, Failure> {
    let recipe = |problem| Failure::new(Exit::Recipe, problem);
    let mesh = config.distributed.mesh(launch.world).map_err(recipe)?;
    if let Some((_, problem)) = config.refused_on(&mesh) {
        return Err(recipe(problem));
    }
    Team::join(launch, mesh, config.distributed.timeout, device).map_err(between_ranks)
}

/// Fails unless the recipe is for this model: `check` could not look at one that was still on the Hub.
fn fits(loaded: &Loaded, launch: &Launch, folder: &ModelFolder) -> Result<(), Failure> {
    let family = models::family_of(folder).map_err(unusable)?;
    let mesh = loaded.config.distributed.mesh(launch.world).ok();
    match check::against_family(loaded, mesh.as_ref(), family, folder).into_iter().next() {
        Some(problem) => Err(Failure::new(Exit::Recipe, problem)),
        None => Ok(()),
    }
}

fn configuration(work: &Work<Train>) -> Result<Loaded, Failure> {
    let table = work.parameters.table(&work.settings);
    let recipe = |problem| Failure::new(Exit::Recipe, problem);
    let mut loaded = config::load(work.parameters.config.as_deref(), table, &work.request.base_dir).map_err(recipe)?;
    if loaded.problems.is_empty() { Ok(loaded) } else { Err(recipe(loaded.problems.swap_remove(0))) }
}

/// Where the model lies, fetched if it is on the Hub; and whether its files never change in place.
fn model_folder(work: &Work<Train>) -> Result<(PathBuf, bool), Failure> {
    let missing = |what: &str| Failure::new(Exit::Usage, Problem::new(format!("the request has no {what}")));
    let source = work.request.sources.get("model").ok_or_else(|| missing("source `model`"))?;
    if source.kind == SourceKind::Path {
        return Ok((PathBuf::from(&source.location), false));
    }
    let commit = source.commit.as_deref().ok_or_else(|| missing("commit of the model"))?;
    let progress = |done, total| {
        work.events.progress("fetching the model", done, Some(total), "bytes", None);
        if work.events.interrupted() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let folder = hub::Repo::model(&source.location)
        .and_then(|repo| hub::local_folder(&repo, commit, &source.parts, &progress))
        .map_err(|error| Failure::from_diagnostic(error).exit(Exit::Hub))?;
    Ok((folder, true))
}

/// Where a run goes on: steps taken, their rows, and the checkpoint of this run, if it is one.
struct Resumed {
    steps: u64,
    records: Records,
    last: Option<Checkpoint>,
}

fn resume(work: &Work<Train>, config: &Config, session: &mut Session) -> Result<Resumed, Failure> {
    let output = &work.request.output;
    // One rank tidies up before the others look.
    if session.team.leads() {
        fs_err::create_dir_all(output)?;
        for damaged in checkpoint::remove_damaged(output)? {
            work.events.warning(damaged);
        }
    }
    session.team.barrier().map_err(between_ranks)?;
    if let Some(last) = checkpoint::finished(output)?.pop() {
        let steps = checkpoint::restore(session, config, &last.path, false)?;
        return Ok(Resumed { steps, records: Records::restore(output, steps)?, last: Some(last) });
    }
    let steps = match work.request.sources.get("restore_from") {
        Some(source) => checkpoint::restore(session, config, source.location.as_ref(), true)?,
        None => 0,
    };
    Ok(Resumed { steps, records: Records::default(), last: None })
}

/// A run whose length and order are known.
struct Run<'a> {
    work: &'a Work<Train>,
    config: &'a Config,
    dataset: &'a Dataset,
    plan: Plan,
    recipe: Recipe,
    rates: Rates,
    total: u64,
    /// Index of each planned item in the data set.
    trained: Vec<usize>,
    validation: Vec<usize>,
    preview: Option<Preview<'a>>,
    immutable: bool,
}

impl<'a> Run<'a> {
    fn new(
        work: &'a Work<Train>,
        config: &'a Config,
        dataset: &'a Dataset,
        session: &Session,
        immutable: bool,
    ) -> Result<Self, Failure> {
        let items = dataset.items();
        let validation = config.validation.as_ref().map_or(Vec::new(), |v| validate::chosen(v, items, config.seed));
        let held_out = config.validation.as_ref().is_some_and(|validation| validation.held_out);
        let trained: Vec<usize> = (0..items.len()).filter(|i| !(held_out && validation.contains(i))).collect();
        let planned: Vec<Item> = trained.iter().map(|index| items[*index].clone()).collect();
        let members = session.division().members();
        let plan = Plan::new(&planned, Rule::new(config, members, must_keep_step(session), dataset.stride()));
        if plan.epoch_len() == 0 {
            let problem = Problem::new("`data.dataloader.drop_last` leaves no sample: no bucket fills a micro-batch");
            return Err(Failure::new(Exit::Recipe, problem.help("lower `step_scheduler.local_batch_size`")));
        }
        let total = config.step_scheduler.total_steps(plan.epoch_len());
        let recipe = Recipe {
            seed: config.seed,
            levels: experts::levels(config, &session.roles).map_err(unusable)?,
            windows: session.roles.iter().map(|role| role.window).collect(),
            weighting: config.flow_matching.weighting().map_err(unusable)?,
            dropout: config.flow_matching.cfg_dropout_prob,
            family: session.family,
            compute: session.compute,
            device: session.device,
        };
        let prepare = |samples| Preview::prepare(samples, session, dataset.max_tokens());
        let preview = config.samples.as_ref().map(prepare).transpose()?;
        let rates = Rates::new(config.lr_scheduler.as_ref(), &config.optimizer, total);
        if rates.warmup() >= total {
            work.events.warning(format!("the run has {} and warms up for {}", counted(total, "step"), rates.warmup()));
        }
        Ok(Self { work, config, dataset, plan, recipe, rates, total, trained, validation, preview, immutable })
    }

    /// Whatever makes the numbers must be the same on all ranks.
    fn agree(&self, session: &Session, resumed: &Resumed) -> Result<(), Failure> {
        let digest = |texts: &[&str]| texts.iter().fold(0, |sum, text| Stream::new(sum, &[(*text).into()]).bits64());
        let recipe = serde_json::to_string(self.config).map_err(Failure::from_error)?;
        let ids: Vec<&str> = self.dataset.items().iter().map(|item| item.sample_id.as_str()).collect();
        // All experts are of one architecture.
        let trained = session.experts.first().map_or(&[][..], |expert| expert.spread.trained());
        let names: Vec<&str> = trained.iter().map(|(name, _)| name.as_str()).collect();
        for (what, value) in [
            ("training recipe", digest(&[&recipe])),
            ("data set", digest(&ids)),
            ("set of trained parameters", digest(&names)),
            ("number of finished steps", resumed.steps),
        ] {
            session.team.same(what, value).map_err(between_ranks)?;
        }
        Ok(())
    }

    fn train(&self, session: &mut Session, resumed: Resumed) -> Result<Outcome, Failure> {
        let Resumed { steps: first, mut records, mut last } = resumed;
        if first > 0 {
            self.work.events.warning(format!("going on after step {}", first - 1));
        }
        if first < self.total {
            let planned = Planned { run: self };
            last = planned.steps(session, first, &mut records)?;
        }
        let last = last.ok_or_else(|| {
            let message = format!(
                "`checkpoint.restore_from` already has {first} of {}: nothing to train",
                counted(self.total, "step")
            );
            Failure::new(Exit::Recipe, Problem::new(message).help("raise `step_scheduler.max_steps`"))
        })?;
        if session.team.leads() {
            records.write(&self.work.request.output)?;
            self.write_held()?;
            self.write_best(&records)?;
        }
        Ok(self.outcome(&records, &last))
    }

    fn checkpoint_due(&self, step: u64) -> bool {
        let by_rule = self.config.step_scheduler.checkpoint_after(step, self.plan.epoch_len(), self.total);
        by_rule && (self.config.checkpoint.enabled || step + 1 == self.total)
    }

    /// Of the checkpoints up to step `newest`, the one with the lowest validation loss, and that loss, if it is to be kept.
    fn best(&self, records: &Records, newest: u64) -> Option<(u64, f64)> {
        let validated = records.validation_means().into_iter();
        let of_checkpoints = validated.filter(|(step, _)| *step <= newest && self.checkpoint_due(*step));
        of_checkpoints.filter(|_| self.config.checkpoint.keep_best).min_by(|(_, a), (_, b)| a.total_cmp(b))
    }

    /// Names the best checkpoint in `best.json`.
    fn write_best(&self, records: &Records) -> Result<(), Failure> {
        let Some((step, loss)) = self.best(records, self.total) else { return Ok(()) };
        let name = Checkpoint::name(step / self.plan.epoch_len(), step);
        let text = format!("{:#}\n", json!({"checkpoint": name, "validation_loss": loss}));
        Ok(fs_err::write(self.work.request.output.join("best.json"), text)?)
    }

    /// Says which samples were not trained on.
    fn write_held(&self) -> Result<(), Failure> {
        let trained: BTreeSet<usize> = self.trained.iter().copied().collect();
        let kept_out = self.dataset.items().iter().enumerate().filter(|(index, _)| !trained.contains(index));
        let held = kept_out.map(|(_, item)| Held {
            sample_id: item.sample_id.clone(),
            bucket: item.bucket.to_string(),
            reason: "held out for validation".to_owned(),
        });
        tables::write(&self.work.request.output.join("held.parquet"), held).map_err(Failure::from_diagnostic)?;
        Ok(())
    }

    fn outcome(&self, records: &Records, last: &Checkpoint) -> Outcome {
        let loss = records.steps.last().map_or(f64::NAN, |row| row.loss);
        let name = Checkpoint::name(last.epoch, last.step);
        let taken = self.dataset.items().len() as u64;
        let out = self.trained.len() as u64;
        Outcome {
            summary: format!("{}, loss {loss:.4}, {name}", counted(last.step + 1, "step")),
            ledger: Ledger { taken, out, rejected: 0, held: taken - out },
            info: json!({
                "checkpoint": name,
                "steps": last.step + 1,
                "steps_per_epoch": self.plan.epoch_len(),
                "loss": if loss.is_finite() { json!(loss) } else { json!(null) },
                "held_out": self.dataset.items().len() - self.trained.len(),
            }),
        }
    }
}

/// Whether ranks that train the same expert must run it as often as each other.
fn must_keep_step(session: &Session) -> bool {
    session.experts.iter().any(|expert| expert.spread.in_step())
}

/// Does something with the averages in place of what is trained, where there are any.
fn averaged<T>(session: &mut Session, act: impl FnOnce(&Session) -> Result<T, Failure>) -> Result<T, Failure> {
    let swap = |session: &mut Session| -> Result<(), Failure> {
        for Expert { ema, spread, .. } in &mut session.experts {
            if let Some(ema) = ema {
                spread.release().map_err(between_ranks)?;
                ema.swap().map_err(Failure::from_diagnostic)?;
            }
        }
        Ok(())
    };
    swap(session)?;
    let done = act(session);
    // What is trained comes back whatever happened; what failed first is told.
    let back = swap(session);
    done.and_then(|done| back.map(|()| done))
}

/// The loop itself.
struct Planned<'r, 'a> {
    run: &'r Run<'a>,
}

impl Planned<'_, '_> {
    /// Takes the steps from `first` on; the last checkpoint.
    fn steps(&self, session: &mut Session, first: u64, records: &mut Records) -> Result<Option<Checkpoint>, Failure> {
        let Run { recipe, dataset, plan, trained, total, .. } = self.run;
        let in_step = must_keep_step(session);
        let ranks = Ranks { own: session.team.share().0, division: session.division(), in_step };
        with_pieces(recipe, dataset, plan, trained, ranks, first..*total, |pieces| {
            let (mut last, mut under, mut told) = (None, None, false);
            for step in first..*total {
                let started = Instant::now();
                let stepped = self.step(session, step, pieces)?;
                self.record(session, step, &stepped, started, records)?;
                if let Some(what) = nn::attention::unfused().filter(|_| !told && session.team.leads()) {
                    told = true;
                    let warning =
                        format!("attention runs without a fused kernel, slower and with all scores in memory: {what}");
                    self.run.work.events.warning(warning);
                }
                // From the second step on the ranks repeat themselves.
                session.team.trust();
                let stop = session.team.any(self.run.work.events.interrupted()).map_err(between_ranks)?;
                self.look(session, step, records)?;
                let due = stop || self.run.checkpoint_due(step);
                // One is under way at most.
                under = self.advance(session, under, due, records, &mut last)?;
                if due {
                    let at_once = stop || step + 1 == *total;
                    under = self.checkpoint(session, step, records, at_once, &mut last)?;
                }
                if stop && step + 1 < *total {
                    let kept = format!("kept: {} of this stage", counted(step + 1, "step"));
                    return Err(Failure::interrupted(kept));
                }
            }
            Ok(last)
        })
    }

    fn step(&self, session: &mut Session, step: u64, pieces: &Pieces) -> Result<Stepped, Failure> {
        let Run { config, rates, dataset, .. } = self.run;
        let gone = || Failure::new(Exit::Bug, Problem::new("the thread that prepares batches ended early"));
        let Piece::Step(start) = pieces.next().ok_or_else(gone)?? else { return Err(gone()) };
        let batches = start.work.iter().map(|amount| amount.batches).sum();
        let mut accumulation = Accumulation::begin(session, start)?;
        for _ in 0..batches {
            let Piece::Batch(batch) = pieces.next().ok_or_else(gone)?? else { return Err(gone()) };
            accumulation.add(*batch)?;
        }
        accumulation.finish(step, config, rates, dataset.items())
    }

    fn record(
        &self,
        session: &Session,
        step: u64,
        stepped: &Stepped,
        started: Instant,
        records: &mut Records,
    ) -> Result<(), Failure> {
        let Run { plan, total, dataset, work, .. } = self.run;
        let epoch = (step / plan.epoch_len()) as i64;
        let seconds = started.elapsed().as_secs_f64();
        let memory = torch::memory::peak(session.device).map_err(Failure::from_diagnostic)?.unwrap_or(0);
        let memory = session.team.greatest(memory as f64).map_err(between_ranks)?;
        let samples = stepped.samples.len();
        let Stepped { loss, lr, grad_norm, .. } = *stepped;
        records.steps.push(Step {
            step: step as i64,
            epoch,
            loss,
            lr,
            grad_norm,
            samples: samples as i64,
            seconds,
            memory_bytes: memory as i64,
        });
        records.losses.extend(stepped.samples.iter().map(|seen| Loss {
            step: step as i64,
            epoch,
            sample_id: dataset.items()[seen.sample].sample_id.clone(),
            sigma: seen.draw.sigma,
            weight: seen.draw.weight,
            loss: seen.loss,
            dropped: seen.draw.dropped,
        }));
        let rate = samples as f64 / seconds.max(1e-9);
        work.events.metric(
            step,
            &[
                ("loss", loss),
                ("lr", lr),
                ("grad_norm", grad_norm),
                ("samples_per_second", rate),
                ("memory_bytes", memory),
            ],
        );
        let note = format!("loss {loss:.4}, {rate:.2} samples/s");
        work.events.progress("training", step + 1, Some(*total), "steps", Some(note));
        Ok(())
    }

    /// Validation and pictures, when due, of what a checkpoint would hold.
    fn look(&self, session: &mut Session, step: u64, records: &mut Records) -> Result<(), Failure> {
        let Run { config, preview, total, .. } = self.run;
        let due = |every: u64| (step + 1).is_multiple_of(every) || step + 1 == *total;
        let validation = config.validation.as_ref().filter(|settings| due(settings.every_steps));
        let preview = preview.as_ref().filter(|_| config.samples.as_ref().is_some_and(|set| due(set.every_steps)));
        if validation.is_none() && preview.is_none() {
            return Ok(());
        }
        averaged(session, |session| self.look_now(session, step, validation, preview, records))
    }

    fn look_now(
        &self,
        session: &Session,
        step: u64,
        validation: Option<&Validation>,
        preview: Option<&Preview<'_>>,
        records: &mut Records,
    ) -> Result<(), Failure> {
        let Run { config, recipe, dataset, validation: samples, work, .. } = self.run;
        if let Some(settings) = validation {
            let local = config.step_scheduler.local_batch_size;
            let rows = validate::losses(session, recipe, dataset, samples, settings, local, step)?;
            let mean = rows.iter().map(|row| row.loss).sum::<f64>() / rows.len() as f64;
            work.events.metric(step, &[("validation_loss", mean)]);
            records.validation.extend(rows);
        }
        if let Some(preview) = preview {
            preview.draw(session, &work.request.output, step, &work.events)?;
        }
        Ok(())
    }

    /// Writes the checkpoint after `step`, or begins to: `at_once`, or when training is not to wait for it.
    fn checkpoint(
        &self,
        session: &Session,
        step: u64,
        records: &Records,
        at_once: bool,
        last: &mut Option<Checkpoint>,
    ) -> Result<Option<Writing>, Failure> {
        let Run { config, plan, work, immutable, .. } = self.run;
        let output = &work.request.output;
        if session.team.leads() {
            records.write(output)?;
        }
        let origin = Origin { base_model: &config.model.name, immutable: *immutable };
        let beside = config.checkpoint.beside_training && !at_once;
        let draft = Draft::new(session, config, output, (step / plan.epoch_len(), step), &origin, beside)?;
        if beside {
            return Writing::begin(draft).map(Some);
        }
        self.written(session, draft.complete(session)?, records, last)?;
        Ok(None)
    }

    /// What is still under way of a checkpoint; with `wait`, nothing.
    fn advance(
        &self,
        session: &Session,
        under: Option<Writing>,
        wait: bool,
        records: &Records,
        last: &mut Option<Checkpoint>,
    ) -> Result<Option<Writing>, Failure> {
        match under.map(|writing| writing.advance(session, wait)).transpose()? {
            Some(Advance::Done(checkpoint)) => self.written(session, checkpoint, records, last).map(|()| None),
            Some(Advance::Under(writing)) => Ok(Some(writing)),
            None => Ok(None),
        }
    }

    /// A checkpoint is on the disk.
    fn written(
        &self,
        session: &Session,
        new: Checkpoint,
        records: &Records,
        last: &mut Option<Checkpoint>,
    ) -> Result<(), Failure> {
        let Run { config, work, .. } = self.run;
        // One that only an interrupt made has done its duty: the result is that of an undisturbed run.
        if session.team.leads() {
            let keep = config.checkpoint.max_recent;
            let best = self.run.best(records, new.step).map(|(step, _)| step);
            checkpoint::retain(&work.request.output, keep, best, &new, |step| self.run.checkpoint_due(step))?;
        }
        session.team.barrier().map_err(between_ranks)?;
        work.events.output(format!("checkpoint after step {}", new.step), new.path.clone());
        *last = Some(new);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_of_a_host_take_the_gpus_of_their_numbers() {
        let launch = Launch { rank: 9, world: 16, local_rank: 1, local_world: 8, meeting: None };
        assert_eq!(own_device("cuda", &launch).unwrap(), "cuda:1");
        assert_eq!(own_device("cpu", &launch).unwrap(), "cpu");
        assert!(own_device("cuda:3", &launch).unwrap_err().problem.message.contains("is one GPU for 8 ranks"));
        assert_eq!(own_device("cuda:3", &Launch::alone()).unwrap(), "cuda:3");
        assert_eq!(own_device("cuda", &Launch::alone()).unwrap(), "cuda");
    }
}
