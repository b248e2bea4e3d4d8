//! The order in which the ranks of a pipeline run their micro-batches, as lists; nothing is run here.
//!
//! Each of `ranks` ranks has `chunks` runs of blocks: run k of the model is chunk `k / ranks` of rank `k % ranks`. With one
//! chunk the order is 1F1B (Narayanan et al. 2019, "PipeDream"): a rank that is n ranks before the last one runs n
//! micro-batches forward before the first comes back, then one backward after each forward. With several it is interleaved
//! (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters"): micro-batches go in groups of as
//! many as there are ranks, a group through one chunk after the other, so a rank idles while the pipeline fills and drains for
//! 1/`chunks` of the time. Any number of micro-batches will do; the last group may be smaller.

/// Which way a micro-batch goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Pass {
    /// Towards the loss.
    Forward,
    /// From the loss.
    Backward,
}

/// One thing that a rank does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Action {
    /// Which way.
    pub pass: Pass,
    /// Through which of the rank's runs of blocks.
    pub chunk: usize,
    /// The micro-batch, by its number in the step.
    pub batch: usize,
}

/// What a run needs from a neighbour before it goes `pass` with `batch`: the streams, or their gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Letter {
    pub(crate) pass: Pass,
    /// The run that needs it.
    pub(crate) run: usize,
    pub(crate) batch: usize,
}

/// What every rank does in a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Schedule {
    ranks: usize,
    chunks: usize,
    /// By rank.
    actions: Vec<Vec<Action>>,
}

/// Slots that a chunk takes for a micro-batch: backward is about twice the work.
const SLOTS: [usize; 2] = [1, 2];

impl Schedule {
    /// Forward and backward of `batches` micro-batches.
    pub(crate) fn new(ranks: usize, chunks: usize, batches: usize) -> Self {
        Filling::new(ranks, chunks, batches).schedule()
    }

    /// One micro-batch forward only.
    pub(crate) fn forward(ranks: usize, chunks: usize) -> Self {
        let actions = (0..chunks).map(|chunk| Action { pass: Pass::Forward, chunk, batch: 0 }).collect();
        Self { ranks, chunks, actions: vec![actions; ranks] }
    }

    /// Ranks.
    pub(crate) fn ranks(&self) -> usize {
        self.ranks
    }

    /// What `rank` does, in order.
    pub(crate) fn of(&self, rank: usize) -> &[Action] {
        &self.actions[rank]
    }

    /// What `rank` waits for before `action`, and from which rank.
    pub(crate) fn awaits(&self, rank: usize, action: Action) -> Option<(usize, Letter)> {
        let Action { pass, chunk, batch } = action;
        let run = chunk * self.ranks + rank;
        let from = match pass {
            Pass::Forward => run.checked_sub(1),
            Pass::Backward => Some(run + 1).filter(|next| *next < self.ranks * self.chunks),
        };
        from.map(|from| (from % self.ranks, Letter { pass, run, batch }))
    }

    /// What `rank` sends after `action`, and to which rank.
    pub(crate) fn sends(&self, rank: usize, action: Action) -> Option<(usize, Letter)> {
        let Action { pass, chunk, batch } = action;
        let run = chunk * self.ranks + rank;
        let to = match pass {
            Pass::Forward => Some(run + 1).filter(|next| *next < self.ranks * self.chunks),
            Pass::Backward => run.checked_sub(1),
        };
        to.map(|run| (run % self.ranks, Letter { pass, run, batch }))
    }

    /// What rank `from` sends to rank `to`, in order.
    pub(crate) fn letters(&self, from: usize, to: usize) -> impl Iterator<Item = Letter> {
        let sent = self.actions[from].iter().filter_map(move |action| self.sends(from, *action));
        sent.filter(move |(rank, _)| *rank == to).map(|(_, letter)| letter)
    }
}

/// A schedule while it is made: slot by slot, each rank that is free does the next forward if it can and not too many
/// micro-batches are under way, else the next backward if it can.
struct Filling {
    ranks: usize,
    chunks: usize,
    /// (chunk, micro-batch) in the order of forwards and of backwards, the same on all ranks.
    orders: [Vec<(usize, usize)>; 2],
    /// By rank: how many of each order are done.
    done: Vec<[usize; 2]>,
    /// By pass, run and micro-batch: the slot after which it is over.
    over: [Vec<Vec<Option<usize>>>; 2],
    /// By rank: when it is free.
    free: Vec<usize>,
    actions: Vec<Vec<Action>>,
}

impl Filling {
    fn new(ranks: usize, chunks: usize, batches: usize) -> Self {
        let order = |chunks: &[usize]| -> Vec<(usize, usize)> {
            let group = |first: usize| first..(first + ranks).min(batches);
            let groups = (0..batches).step_by(ranks);
            groups.flat_map(|first| chunks.iter().flat_map(move |c| group(first).map(|batch| (*c, batch)))).collect()
        };
        let there: Vec<usize> = (0..chunks).collect();
        let back: Vec<usize> = (0..chunks).rev().collect();
        Self {
            ranks,
            chunks,
            orders: [order(&there), order(&back)],
            done: vec![[0; 2]; ranks],
            over: [(); 2].map(|()| vec![vec![None; batches]; ranks * chunks]),
            free: vec![0; ranks],
            actions: vec![Vec::new(); ranks],
        }
    }

    fn schedule(mut self) -> Schedule {
        let total = self.orders[0].len();
        let mut now = 0;
        while self.done.iter().any(|done| done[1] < total) {
            let ready: Vec<Option<Action>> = (0..self.ranks).map(|rank| self.choice(rank, now)).collect();
            for (rank, action) in ready.iter().enumerate().filter_map(|(rank, action)| Some((rank, (*action)?))) {
                let Action { pass, chunk, batch } = action;
                let end = now + SLOTS[pass as usize];
                self.free[rank] = end;
                self.done[rank][pass as usize] += 1;
                self.over[pass as usize][chunk * self.ranks + rank][batch] = Some(end);
                self.actions[rank].push(action);
            }
            let busy = self.free.iter().any(|free| *free > now);
            assert!(busy, "some rank of a pipeline has something to do until all is done");
            now += 1;
        }
        Schedule { ranks: self.ranks, chunks: self.chunks, actions: self.actions }
    }

    /// What `rank` begins in slot `now`.
    fn choice(&self, rank: usize, now: usize) -> Option<Action> {
        if self.free[rank] > now {
            return None;
        }
        let [forwards, backwards] = self.done[rank];
        let next = |pass: Pass, done: usize| {
            let (chunk, batch) = *self.orders[pass as usize].get(done)?;
            let action = Action { pass, chunk, batch };
            self.can(rank, action, now).then_some(action)
        };
        let room = forwards - backwards < self.most(rank);
        let forward = if room { next(Pass::Forward, forwards) } else { None };
        forward.or_else(|| next(Pass::Backward, backwards))
    }

    /// Whether what `action` needs is there.
    fn can(&self, rank: usize, action: Action, now: usize) -> bool {
        let Action { pass, chunk, batch } = action;
        let run = chunk * self.ranks + rank;
        let is_over = |pass: Pass, run: usize| self.over[pass as usize][run][batch].is_some_and(|end| end <= now);
        match pass {
            Pass::Forward => run == 0 || is_over(Pass::Forward, run - 1),
            Pass::Backward => {
                let is_last = run + 1 == self.ranks * self.chunks;
                is_over(Pass::Forward, run) && (is_last || is_over(Pass::Backward, run + 1))
            }
        }
    }

    /// Micro-batches that may be under way on `rank`, counted once for each chunk: enough to fill the pipeline, as few as can be to
    /// save memory.
    fn most(&self, rank: usize) -> usize {
        let after = self.ranks - 1 - rank;
        match self.chunks {
            1 => after + 1,
            chunks => 2 * after + (chunks - 1) * self.ranks + 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeSet, VecDeque};

    use super::*;

    /// `F0.3`: forward of micro-batch 3 through chunk 0.
    fn told(schedule: &Schedule, rank: usize) -> String {
        let one = |action: &Action| {
            let pass = ["F", "B"][action.pass as usize];
            if schedule.chunks == 1 {
                format!("{pass}{}", action.batch)
            } else {
                format!("{pass}{}.{}", action.chunk, action.batch)
            }
        };
        schedule.of(rank).iter().map(one).collect::<Vec<_>>().join(" ")
    }

    /// Runs the lists as ranks do, each in its order, waiting for what it needs: the slots until all are done. Fails if they wait for
    /// each other, or if letters come in another order than they are taken, those that come early being kept.
    fn run(schedule: &Schedule) -> usize {
        let ranks = schedule.ranks;
        let mut post: Vec<Vec<VecDeque<(Letter, usize)>>> = vec![vec![VecDeque::new(); ranks]; ranks];
        let mut early = BTreeSet::new();
        let mut left: Vec<VecDeque<Action>> =
            (0..ranks).map(|rank| schedule.of(rank).iter().copied().collect()).collect();
        let mut expected: Vec<Vec<VecDeque<Letter>>> =
            (0..ranks).map(|from| (0..ranks).map(|to| schedule.letters(from, to).collect()).collect()).collect();
        let mut clock = vec![0; ranks];
        while left.iter().any(|left| !left.is_empty()) {
            let mut moved = false;
            for rank in 0..ranks {
                while let Some(action) = left[rank].front().copied() {
                    if let Some((from, letter)) = schedule.awaits(rank, action) {
                        while !early.contains(&letter) {
                            let Some((came, at)) = post[from][rank].pop_front() else { break };
                            assert_eq!(expected[from][rank].pop_front(), Some(came));
                            early.insert(came);
                            if came == letter {
                                clock[rank] = clock[rank].max(at);
                            }
                        }
                        if !early.remove(&letter) {
                            break;
                        }
                    }
                    left[rank].pop_front();
                    moved = true;
                    clock[rank] += SLOTS[action.pass as usize];
                    if let Some((to, letter)) = schedule.sends(rank, action) {
                        post[rank][to].push_back((letter, clock[rank]));
                    }
                }
            }
            assert!(moved, "ranks wait for each other: {left:?}");
        }
        assert!(post.iter().flatten().all(VecDeque::is_empty) && early.is_empty(), "what is sent is taken");
        assert!(expected.iter().flatten().all(VecDeque::is_empty));
        clock.into_iter().max().unwrap_or(0)
    }

    /// Of all ranks together, the share of the time in which nothing is done.
    fn bubble(ranks: usize, chunks: usize, batches: usize) -> f64 {
        let schedule = Schedule::new(ranks, chunks, batches);
        let busy = batches * chunks * (SLOTS[0] + SLOTS[1]);
        1.0 - busy as f64 / run(&schedule) as f64
    }

    #[test]
    fn one_chunk_is_one_forward_one_backward() {
        let schedule = Schedule::new(4, 1, 6);
        assert_eq!(told(&schedule, 3), "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5");
        assert_eq!(told(&schedule, 1), "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5");
        assert_eq!(told(&schedule, 0), "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5");
        assert_eq!(told(&Schedule::new(1, 1, 2), 0), "F0 B0 F1 B1");
    }

    /// The order of Megatron-LM for two ranks of two chunks and four micro-batches.
    #[test]
    fn chunks_are_interleaved() {
        let schedule = Schedule::new(2, 2, 4);
        let first = "F0.0 F0.1 F1.0 F1.1 F0.2 B1.0 F0.3 B1.1 F1.2 B0.0 F1.3 B0.1 B1.2 B1.3 B0.2 B0.3";
        let second = "F0.0 F0.1 F1.0 B1.0 F1.1 B1.1 F0.2 B0.0 F0.3 B0.1 F1.2 B1.2 F1.3 B1.3 B0.2 B0.3";
        assert_eq!((told(&schedule, 0).as_str(), told(&schedule, 1).as_str()), (first, second));
    }

    /// 1F1B idles for ranks - 1 micro-batches, there and back; interleaving, for that over the chunks (section 2.2 of the paper).
    #[test]
    fn interleaving_idles_less() {
        for (ranks, groups) in [(2, 2), (2, 4), (4, 1), (4, 2), (8, 2)] {
            let batches = ranks * groups;
            let whole = bubble(ranks, 1, batches);
            let expected = |chunks: f64| 1.0 - batches as f64 / (batches as f64 + (ranks as f64 - 1.0) / chunks);
            assert!((whole - expected(1.0)).abs() < 1e-9, "{ranks} {batches}: {whole}");
            for chunks in [2, 4] {
                let divided = bubble(ranks, chunks, batches);
                assert!((divided - expected(chunks as f64)).abs() < 1e-9, "{ranks} {batches} {chunks}: {divided}");
            }
        }
    }

    /// Ranks, chunks and micro-batches: all small numbers of them.
    fn sizes() -> impl Iterator<Item = (usize, usize, usize)> {
        let pairs = (1..7).flat_map(|ranks| (1..5).map(move |chunks| (ranks, chunks)));
        pairs.flat_map(|(ranks, chunks)| (0..20).map(move |batches| (ranks, chunks, batches)))
    }

    /// Everything is done once, there before back, and nobody waits for ever.
    #[test]
    fn every_micro_batch_goes_there_and_back() {
        for (ranks, chunks, batches) in sizes() {
            let what = format!("{ranks} ranks, {chunks} chunks, {batches} micro-batches");
            let schedule = Schedule::new(ranks, chunks, batches);
            assert!(run(&schedule) >= batches * chunks * (SLOTS[0] + SLOTS[1]), "{what}");
            for rank in 0..ranks {
                let actions = schedule.of(rank);
                assert_eq!(actions.len(), 2 * batches * chunks, "{what}");
                let place = |pass, chunk, batch| actions.iter().position(|a| *a == Action { pass, chunk, batch });
                for (chunk, batch) in (0..chunks).flat_map(|chunk| (0..batches).map(move |batch| (chunk, batch))) {
                    let [there, back] = [Pass::Forward, Pass::Backward].map(|pass| place(pass, chunk, batch));
                    assert!(there.is_some() && there < back, "{what}");
                    // In a chunk micro-batches keep their order, so its last backward is that of the last one.
                    let earlier = |pass| if batch > 0 { place(pass, chunk, batch - 1) } else { None };
                    assert!(earlier(Pass::Forward) < there && earlier(Pass::Backward) < back, "{what}");
                }
                let last = actions.last().map(|action| (action.pass, action.chunk, action.batch + 1));
                assert_eq!(last, (batches > 0).then_some((Pass::Backward, 0, batches)), "{what}");
            }
        }
    }

    #[test]
    fn no_more_is_under_way_than_the_pipeline_holds() {
        for (ranks, chunks, batches) in sizes() {
            let schedule = Schedule::new(ranks, chunks, batches);
            for rank in 0..ranks {
                let (mut under_way, mut most) = (0usize, 0);
                for action in schedule.of(rank) {
                    match action.pass {
                        Pass::Forward => under_way += 1,
                        Pass::Backward => under_way -= 1,
                    }
                    most = most.max(under_way);
                }
                let bound = if chunks == 1 { ranks - rank } else { 2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1 };
                assert!(most <= bound, "{ranks} {chunks} {batches}: {most} {bound}");
            }
        }
    }
}
