//! Data parallel with whole copies: gradients are added up in buckets, each as soon as backward has filled it.
//!
//! Li et al. 2020, "PyTorch Distributed". Parameters go into buckets from the last to the first, about the order in which
//! their gradients come. Buckets are reduced in that order on every rank, whatever order they are filled in.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use comm::{Group, Pending, Reduction};
use nn::Named;
use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result};

/// Bytes after which a bucket is closed, PyTorch's default.
pub const BUCKET_BYTES: usize = 25 << 20;

/// Adds up gradients of the same parameters on several ranks.
#[derive(Debug)]
pub struct Reducer {
    state: Arc<Mutex<State>>,
}

#[derive(Debug)]
struct State {
    group: Arc<Group>,
    parameters: Vec<Named>,
    buckets: Vec<Bucket>,
    /// Which bucket each parameter is in.
    bucket_of: Vec<usize>,
    /// The backward under way is the step's last: gradients that come are final.
    armed: bool,
    /// Buckets under way or done; reduction goes in order.
    launched: usize,
    /// Kind in which gradients are added up between ranks.
    reduce: Kind,
    pending: Vec<Launched>,
    /// What went wrong inside backward, which only passes texts on.
    failure: Option<Error>,
}

#[derive(Debug)]
struct Bucket {
    /// Indices of parameters.
    members: Vec<usize>,
    /// Gradients that are final.
    ready: usize,
}

/// A bucket whose reduction is under way.
#[derive(Debug)]
struct Launched {
    pending: Pending,
    /// What its gradients are views of, in f32.
    flat: Tensor,
    /// The same in the kind that is added up.
    sent: Tensor,
}

impl Reducer {
    /// For parameters that require gradients, the same ones in the same order on every rank of `group`.
    /// Gradients are added up between them in the kind `reduce`.
    pub fn new(group: Arc<Group>, parameters: &[Named], bucket_bytes: usize, reduce: Kind) -> Result<Self> {
        let (mut buckets, mut bucket_of) = (Vec::<Bucket>::new(), vec![0; parameters.len()]);
        let mut room = 0;
        for (index, named) in parameters.iter().enumerate().rev() {
            let bytes = named.tensor.numel() * size_of::<f32>();
            if buckets.is_empty() || bytes > room {
                buckets.push(Bucket { members: Vec::new(), ready: 0 });
                room = bucket_bytes;
            }
            room = room.saturating_sub(bytes);
            bucket_of[index] = buckets.len() - 1;
            if let Some(bucket) = buckets.last_mut() {
                bucket.members.push(index);
            }
        }
        let alone = group.size() == 1;
        let state = State {
            group,
            parameters: parameters.to_vec(),
            buckets,
            bucket_of,
            armed: false,
            launched: 0,
            reduce,
            pending: Vec::new(),
            failure: None,
        };
        let state = Arc::new(Mutex::new(state));
        for (index, named) in parameters.iter().enumerate().filter(|_| !alone) {
            // Weak: the parameter owns its hook, and the state owns the parameter.
            let state = Arc::downgrade(&state);
            torch::autograd::on_gradient(&named.tensor, move |_| came(&state, index))?;
        }
        Ok(Self { state })
    }

    /// The next backward is the last one of the step.
    pub fn arm(&self) {
        let mut state = lock(&self.state);
        state.armed = true;
        state.launched = 0;
        for bucket in &mut state.buckets {
            bucket.ready = 0;
        }
    }

    /// Every gradient becomes the sum over the ranks. A parameter without a gradient on all ranks stays without one.
    pub fn finish(&self) -> Result<()> {
        let mut state = lock(&self.state);
        if !state.armed {
            state.launched = 0;
        }
        state.armed = false;
        if state.group.size() == 1 {
            return Ok(());
        }
        let present: Vec<i64> = state.parameters.iter().map(|named| i64::from(has_gradient(named))).collect();
        while state.launched < state.buckets.len() {
            state.launch()?;
        }
        let present = Tensor::f_from_slice(&present)?;
        let flags = state.group.all_reduce(&present, Reduction::Max)?;
        for Launched { pending, mut flat, sent } in std::mem::take(&mut state.pending) {
            pending.wait()?;
            if sent.kind() != flat.kind() {
                flat.f_copy_(&sent)?;
            }
        }
        flags.wait()?;
        let present: Vec<i64> = Vec::try_from(present)?;
        for (named, _) in state.parameters.iter().zip(present).filter(|(_, present)| *present == 0) {
            torch::autograd::set_gradient(&named.tensor, None)?;
        }
        Ok(())
    }

    /// The failure behind an error of backward, if it was this reducer's.
    pub fn failure(&self) -> Option<Error> {
        lock(&self.state).failure.take()
    }
}

/// The gradient of parameter `index` is complete.
fn came(state: &Weak<Mutex<State>>, index: usize) -> Result<(), torch::autograd::BoxError> {
    let Some(state) = state.upgrade() else { return Ok(()) };
    let mut state = lock(&state);
    if !state.armed {
        return Ok(());
    }
    let bucket = state.bucket_of[index];
    let reduced = if bucket < state.launched {
        let name = &state.parameters[index].name;
        Err(Error::Unfit(format!("`{name}` got a second gradient after its first was reduced: two blocks share it")))
    } else {
        state.buckets[bucket].ready += 1;
        state.launch_full()
    };
    reduced.map_err(|error| {
        let text = error.to_string();
        state.failure = Some(error);
        text.into()
    })
}

impl State {
    fn launch_full(&mut self) -> Result<()> {
        while self.buckets.get(self.launched).is_some_and(|bucket| bucket.ready == bucket.members.len()) {
            self.launch()?;
        }
        Ok(())
    }

    /// Puts the next bucket's gradients into one tensor, of which they become views, and starts its reduction.
    fn launch(&mut self) -> Result<()> {
        let members: Vec<&Named> =
            self.buckets[self.launched].members.iter().map(|index| &self.parameters[*index]).collect();
        let count: usize = members.iter().map(|named| named.tensor.numel()).sum();
        let device = members.first().map_or(Device::Cpu, |named| named.tensor.device());
        let flat = Tensor::f_zeros([count as i64], (Kind::Float, device))?;
        let mut from = 0;
        for named in members {
            let length = named.tensor.numel() as i64;
            let view = flat.f_narrow(0, from, length)?.f_view(named.tensor.size().as_slice())?;
            if has_gradient(named) {
                view.shallow_clone().f_copy_(&named.tensor.grad())?;
            }
            torch::autograd::set_gradient(&named.tensor, Some(&view))?;
            from += length;
        }
        let sent = flat.f_to_kind(self.reduce)?;
        let pending = self.group.all_reduce(&sent, Reduction::Sum)?;
        self.pending.push(Launched { pending, flat, sent });
        self.launched += 1;
        Ok(())
    }
}

fn has_gradient(named: &Named) -> bool {
    named.tensor.grad().defined()
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const NAMES: [(&str, i64); 4] = [("a", 7), ("b", 1), ("c", 300), ("d", 15)];

    fn parameters() -> Vec<Named> {
        let named = |(name, size): &(&str, i64)| Named {
            name: (*name).to_owned(),
            tensor: (Tensor::arange(*size, (Kind::Float, Device::Cpu)) * 0.01).set_requires_grad(true),
        };
        NAMES.iter().map(named).collect()
    }

    /// A loss that uses all parameters but `b`, whose gradient depends on the sample.
    fn backward(parameters: &[Named], sample: i64) {
        let used = parameters.iter().filter(|named| named.name != "b");
        let sum =
            used.map(|named| (&named.tensor * sample as f64).sin().sum(Kind::Float)).reduce(|a, b| a + b).unwrap();
        torch::autograd::backward(&[sum], &[], false).unwrap();
    }

    /// The sum over ranks is the sum over samples, whoever had which; a rank may have none at all.
    #[test]
    fn gradients_are_those_of_one_rank() {
        let gradients = |own: &[Named]| -> Vec<Option<Vec<f32>>> {
            own.iter().map(|named| has_gradient(named).then(|| Vec::try_from(named.tensor.grad()).unwrap())).collect()
        };
        let whole = parameters();
        (0..6).for_each(|sample| backward(&whole, sample));
        let expected = gradients(&whole);
        assert!(expected[1].is_none() && expected[3].is_some());
        for (ranks, bucket) in [(1, 64), (2, 64), (3, 1 << 20), (4, 400)] {
            comm::testing::ranks(ranks, Duration::from_mins(1), |world| {
                let own = parameters();
                let reducer = Reducer::new(world.everyone().unwrap(), &own, bucket, Kind::Float).unwrap();
                for step in 0..2 {
                    let tensors: Vec<_> = own.iter().map(|named| named.tensor.shallow_clone()).collect();
                    torch::autograd::clear_gradients(&tensors).unwrap();
                    // Rank 3 has no sample.
                    let samples: Vec<i64> = match ranks {
                        4 => (0..6).filter(|s| s % 3 == world.rank() as i64).collect(),
                        _ => (0..6).filter(|s| s % ranks as i64 == world.rank() as i64).collect(),
                    };
                    for (at, sample) in samples.iter().enumerate() {
                        // Reduced as they come, or all at the end.
                        if at + 1 == samples.len() && step == 0 {
                            reducer.arm();
                        }
                        backward(&own, *sample);
                    }
                    reducer.finish().unwrap();
                    for (found, expected) in gradients(&own).into_iter().zip(&expected) {
                        assert_eq!(found.is_some(), expected.is_some());
                        for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
                            assert!((found - expected).abs() < 1e-4, "{found} {expected}");
                        }
                    }
                }
            });
        }
    }

    #[test]
    fn a_parameter_of_two_backwards_is_refused() {
        comm::testing::ranks(2, Duration::from_mins(1), |world| {
            let own = parameters();
            let reducer = Reducer::new(world.everyone().unwrap(), &own, 1, Kind::Float).unwrap();
            reducer.arm();
            backward(&own, 1);
            let again = (&own[3].tensor * 2.0).sum(Kind::Float);
            torch::autograd::backward(&[again], &[], false).unwrap_err();
            let failure = reducer.failure().unwrap();
            assert!(failure.to_string().contains("`d` got a second gradient"), "{failure}");
        });
    }
}
