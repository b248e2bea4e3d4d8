//! The parameters of one block, held in parts: gathered before the block runs, given up after it; gradients go back to the
//! parts. Both happen in place, each rank's stretch of a unit going from where it lies to where it belongs.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use comm::{Group, Pending, Scattered};
use nn::{Named, Part};
use tch::{Device, Kind, Tensor};

use crate::error::Result;

/// Parameters that come and go together.
#[derive(Debug)]
pub(crate) struct Unit {
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    group: Arc<Group>,
    bundles: Vec<Bundle>,
    /// Whether parameters come right to where they belong: on the host.
    direct: bool,
    /// Kind in which gradients are added up between ranks.
    reduce: Kind,
    place: Place,
    /// The backward under way has come by.
    reduced: bool,
    /// Reductions not yet added to the parts' gradients.
    reducing: Vec<Reducing>,
}

/// Where the whole parameters are.
#[derive(Debug)]
enum Place {
    Away,
    /// What comes of each bundle.
    Coming(Vec<Coming>),
    Here,
}

/// Parameters on their way.
#[derive(Debug)]
struct Coming {
    pending: Pending,
    /// Where they come to, if not right where they belong: the ranks' stretches, end to end.
    gathered: Option<Tensor>,
}

/// Parameters of one kind of number.
#[derive(Debug)]
struct Bundle {
    kind: Kind,
    members: Vec<Member>,
    /// Elements of one rank.
    width: usize,
    /// Whole gradients that are not yet sent, in f32: the ranks' stretches.
    kept: Option<Tensor>,
}

#[derive(Debug)]
struct Member {
    /// What the layers hold, of the whole shape; its memory comes and goes.
    whole: Tensor,
    /// What this rank holds of it, flat.
    part: Tensor,
    /// Where it begins in a rank's stretch of the bundle.
    from: usize,
    /// Whether any backward of the step gave it a gradient on this rank.
    touched: bool,
}

#[derive(Debug)]
struct Reducing {
    bundle: usize,
    sum: Scattered,
}

impl Unit {
    /// For parameters given as (whole, part).
    pub(crate) fn new(group: Arc<Group>, parameters: &[(Named, Named)], reduce: Kind) -> Self {
        let mut bundles: Vec<Bundle> = Vec::new();
        for (whole, part) in parameters {
            let kind = whole.tensor.kind();
            let found = bundles.iter().position(|bundle| bundle.kind == kind);
            let at = found.unwrap_or_else(|| {
                bundles.push(Bundle { kind, members: Vec::new(), width: 0, kept: None });
                bundles.len() - 1
            });
            let width = Part { index: 0, count: group.size() }.width(whole.tensor.numel());
            let bundle = &mut bundles[at];
            let (whole, part) = (whole.tensor.shallow_clone(), part.tensor.shallow_clone());
            bundle.members.push(Member { whole, part, from: bundle.width, touched: false });
            bundle.width += width;
        }
        let direct = bundles.iter().all(|bundle| bundle.device() == Device::Cpu);
        let inner = Inner { group, bundles, direct, reduce, place: Place::Away, reduced: false, reducing: Vec::new() };
        Self { inner: Mutex::new(inner) }
    }

    /// Starts to gather the parameters, if they are away.
    pub(crate) fn start(&self) -> Result<()> {
        self.lock().start()
    }

    /// Gathers the parameters, if they are not here.
    pub(crate) fn need(&self) -> Result<()> {
        self.lock().need()
    }

    /// Gives the whole parameters up.
    pub(crate) fn release(&self) -> Result<()> {
        self.lock().release()
    }

    /// Takes the gradients of a backward, and gives the parameters up. `send`: what was taken so far goes to the parts.
    pub(crate) fn reduce(&self, send: bool) -> Result<()> {
        let mut inner = self.lock();
        // First, to make room: gradients need their parameters' shapes only.
        inner.release()?;
        inner.reduce(send)
    }

    /// Adds what has come of reductions to the parts' gradients.
    pub(crate) fn settle(&self) -> Result<()> {
        self.lock().settle()
    }

    /// A backward is over: whatever it did not reach is reduced as well, so that all ranks do the same.
    pub(crate) fn end_backward(&self, send: bool) -> Result<()> {
        let mut inner = self.lock();
        inner.release()?;
        if !inner.reduced {
            inner.reduce(send)?;
        }
        inner.settle()?;
        inner.reduced = false;
        Ok(())
    }

    /// Sends gradients that were taken and not sent.
    pub(crate) fn send_the_rest(&self) -> Result<()> {
        let mut inner = self.lock();
        if inner.bundles.iter().any(|bundle| bundle.kept.is_some()) {
            inner.send()?;
        }
        inner.settle()
    }

    /// For each parameter, whether the step gave it a gradient on this rank; begins anew.
    pub(crate) fn take_touched(&self) -> Vec<(Tensor, bool)> {
        let mut inner = self.lock();
        let members = inner.bundles.iter_mut().flat_map(|bundle| &mut bundle.members);
        members.map(|member| (member.part.shallow_clone(), std::mem::take(&mut member.touched))).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn start(&mut self) -> Result<()> {
        if matches!(self.place, Place::Away) {
            let gather = |bundle: &Bundle| {
                if self.direct { bundle.gather_pieces(&self.group) } else { bundle.gather_stretches(&self.group) }
            };
            let coming = self.bundles.iter().map(gather).collect::<Result<_>>()?;
            self.place = Place::Coming(coming);
        }
        Ok(())
    }

    fn need(&mut self) -> Result<()> {
        self.start()?;
        if let Place::Coming(coming) = std::mem::replace(&mut self.place, Place::Here) {
            for (bundle, Coming { pending, gathered }) in self.bundles.iter().zip(coming) {
                pending.wait()?;
                if let Some(gathered) = gathered {
                    bundle.fill(&gathered, self.group.size())?;
                }
            }
        }
        Ok(())
    }

    fn release(&mut self) -> Result<()> {
        match std::mem::replace(&mut self.place, Place::Away) {
            Place::Away => return Ok(()),
            Place::Coming(coming) => coming.into_iter().try_for_each(|coming| coming.pending.wait())?,
            Place::Here => {}
        }
        for member in self.bundles.iter().flat_map(|bundle| &bundle.members) {
            torch::storage::free(&member.whole)?;
        }
        Ok(())
    }

    fn reduce(&mut self, send: bool) -> Result<()> {
        self.reduced = true;
        let ranks = self.group.size();
        let trained = |bundle: &&mut Bundle| bundle.members.iter().any(|member| member.part.requires_grad());
        self.bundles.iter_mut().filter(trained).try_for_each(|bundle| bundle.take(ranks))?;
        if send { self.send() } else { Ok(()) }
    }

    /// Starts to add up the ranks' gradients.
    fn send(&mut self) -> Result<()> {
        for (index, bundle) in self.bundles.iter_mut().enumerate() {
            if let Some(kept) = bundle.kept.take() {
                let sum = self.group.reduce_scatter_in_place(&kept.f_to_kind(self.reduce)?)?;
                self.reducing.push(Reducing { bundle: index, sum });
            }
        }
        Ok(())
    }

    fn settle(&mut self) -> Result<()> {
        for Reducing { bundle, sum } in std::mem::take(&mut self.reducing) {
            let sum = sum.wait()?;
            for member in &self.bundles[bundle].members {
                let came = sum.f_narrow(0, member.from as i64, member.part.numel() as i64)?;
                let came = came.f_to_device(member.part.device())?;
                let mut gradient = member.part.grad();
                if gradient.defined() {
                    let _ = tch::no_grad(|| gradient.f_add_(&came))?;
                } else {
                    torch::autograd::set_gradient(&member.part, Some(&came))?;
                }
            }
        }
        Ok(())
    }
}

impl Bundle {
    /// Starts to gather the parameters, each rank's share of each right to its place.
    fn gather_pieces(&self, group: &Group) -> Result<Coming> {
        let mut pieces: Vec<Vec<Tensor>> = (0..group.size()).map(|_| Vec::new()).collect();
        for member in &self.members {
            torch::storage::fill(&member.whole, |whole| -> Result<()> {
                let whole = whole.f_view(-1)?;
                for (pieces, (first, _, length)) in pieces.iter_mut().zip(member.shares(group.size(), self.width)) {
                    pieces.push(whole.f_narrow(0, first, length)?);
                }
                Ok(())
            })?;
        }
        for (piece, member) in pieces[group.index()].iter_mut().zip(&self.members) {
            tch::no_grad(|| piece.f_copy_(&member.part))?;
        }
        Ok(Coming { pending: group.all_gather_pieces(&pieces)?, gathered: None })
    }

    /// Starts to gather the parameters in one call, the ranks' stretches end to end.
    fn gather_stretches(&self, group: &Group) -> Result<Coming> {
        let (own, device) = (group.index(), self.device());
        let gathered = Tensor::f_empty([(self.width * group.size()) as i64], (self.kind, device))?;
        for member in &self.members {
            let from = (own * self.width + member.from) as i64;
            let mut place = gathered.f_narrow(0, from, member.part.numel() as i64)?;
            let part = tch::no_grad(|| torch::host::upload_beside(&member.part, device))?;
            tch::no_grad(|| place.f_copy_(&part))?;
        }
        Ok(Coming { pending: group.all_gather_in_place(&gathered)?, gathered: Some(gathered) })
    }

    /// Puts gathered values into the whole parameters.
    fn fill(&self, gathered: &Tensor, ranks: usize) -> Result<()> {
        for member in &self.members {
            torch::storage::fill(&member.whole, |whole| -> Result<()> {
                let whole = whole.f_view(-1)?;
                member.shares(ranks, self.width).try_for_each(|(to, from, length)| {
                    tch::no_grad(|| whole.f_narrow(0, to, length)?.f_copy_(&gathered.f_narrow(0, from, length)?))?;
                    Ok(())
                })
            })?;
        }
        Ok(())
    }

    /// Adds the gradients that the layers have to those kept, f32, and takes them from the layers.
    fn take(&mut self, ranks: usize) -> Result<()> {
        let (width, options) = (self.width, (Kind::Float, self.device()));
        let (kept, first) = match self.kept.take() {
            Some(kept) => (kept, false),
            None => (Tensor::f_empty([(width * ranks) as i64], options)?, true),
        };
        for member in &mut self.members {
            let gradient = member.whole.grad();
            let gradient = if gradient.defined() { Some(gradient.f_reshape([-1])?) } else { None };
            member.touched |= gradient.is_some();
            for (from, to, length) in member.shares(ranks, width) {
                tch::no_grad(|| {
                    let mut place = kept.f_narrow(0, to, length)?;
                    match &gradient {
                        Some(gradient) if first => place.f_copy_(&gradient.f_narrow(0, from, length)?),
                        Some(gradient) => place.f_add_(&gradient.f_narrow(0, from, length)?).map(drop),
                        None if first => place.f_zero_().map(drop),
                        None => Ok(()),
                    }
                })?;
            }
            if gradient.is_some() {
                torch::autograd::set_gradient(&member.whole, None)?;
            }
        }
        self.kept = Some(kept);
        Ok(())
    }

    /// Where the layers compute; the parts may lie in host memory.
    fn device(&self) -> Device {
        self.members.first().map_or(Device::Cpu, |member| member.whole.device())
    }
}

impl Member {
    /// Each rank's share: its first element in the whole, its place in stretches of `stride` a rank, its elements.
    fn shares(&self, ranks: usize, stride: usize) -> impl Iterator<Item = (i64, i64, i64)> {
        let (total, from) = (self.whole.numel(), self.from);
        Part::all(ranks).map(move |part| {
            let range = part.range(total);
            (range.start as i64, (part.index * stride + from) as i64, range.len() as i64)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Both ways to gather, of which a GPU takes the second, and the gradients' way back, at sizes that no number of ranks divides.
    #[test]
    fn what_comes_is_the_whole_and_what_goes_is_the_sum() {
        const SIZES: [&[i64]; 4] = [&[7, 3], &[1], &[2, 2, 5], &[31]];
        for (ranks, direct) in [(1, true), (2, true), (2, false), (3, true), (3, false), (4, false)] {
            comm::testing::ranks(ranks, Duration::from_mins(1), |world| {
                let group = world.everyone().unwrap();
                let own = Part { index: group.index(), count: ranks };
                let named = |tensor: Tensor| Named { name: String::new(), tensor: tensor.set_requires_grad(true) };
                let value =
                    |size: &[i64]| Tensor::arange(size.iter().product::<i64>(), (Kind::Float, Device::Cpu)) + size[0];
                let pair = |size: &&[i64]| {
                    let range = own.range(value(size).numel());
                    let part = value(size).narrow(0, range.start as i64, range.len() as i64).copy();
                    let whole = Tensor::zeros(*size, (Kind::Float, Device::Cpu));
                    torch::storage::free(&whole).unwrap();
                    (named(whole), named(part))
                };
                let pairs: Vec<_> = SIZES.iter().map(pair).collect();
                let unit = Unit::new(Arc::clone(&group), &pairs, Kind::Float);
                unit.lock().direct = direct;
                for times in 1..=2 {
                    unit.start().unwrap();
                    unit.need().unwrap();
                    for (size, (whole, _)) in SIZES.iter().zip(&pairs) {
                        assert!(whole.tensor.reshape([-1]).equal(&value(size)), "{ranks} {direct}");
                        let gradient = whole.tensor.detach().copy() * (group.index() + 1) as f64;
                        torch::autograd::set_gradient(&whole.tensor, Some(&gradient)).unwrap();
                    }
                    unit.end_backward(true).unwrap();
                    let sum = (1..=ranks).sum::<usize>() * times;
                    for (size, (whole, part)) in SIZES.iter().zip(&pairs) {
                        assert_eq!(torch::storage::bytes(&whole.tensor), 0);
                        let range = own.range(value(size).numel());
                        let expected = value(size).narrow(0, range.start as i64, range.len() as i64) * sum as f64;
                        assert!(range.is_empty() || part.tensor.grad().equal(&expected), "{ranks} {direct}");
                    }
                }
            });
        }
    }
}
