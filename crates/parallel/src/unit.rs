//! The parameters of one block, held in parts: gathered before the block runs, given up after it; gradients go back to the
//! parts. One collective a unit and direction (and kind of number).

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use comm::{Group, Pending};
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
    place: Place,
    /// Gradients of the backward under way are on their way to the parts.
    reduced: bool,
    /// Reductions not yet added to the parts' gradients.
    reducing: Vec<Reducing>,
}

/// Where the whole parameters are.
#[derive(Debug)]
enum Place {
    Away,
    /// One gathered tensor for each bundle, and the collective that fills it.
    Coming(Vec<(Tensor, Pending)>),
    Here,
}

/// Parameters of one kind of number.
#[derive(Debug)]
struct Bundle {
    kind: Kind,
    members: Vec<Member>,
    /// Elements of one rank.
    width: usize,
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
    output: Tensor,
    pending: Pending,
}

impl Unit {
    /// For parameters given as (whole, part).
    pub(crate) fn new(group: Arc<Group>, parameters: &[(Named, Named)]) -> Self {
        let mut bundles: Vec<Bundle> = Vec::new();
        for (whole, part) in parameters {
            let kind = whole.tensor.kind();
            let found = bundles.iter().position(|bundle| bundle.kind == kind);
            let at = found.unwrap_or_else(|| {
                bundles.push(Bundle { kind, members: Vec::new(), width: 0 });
                bundles.len() - 1
            });
            let width = Part { index: 0, count: group.size() }.width(whole.tensor.numel());
            let bundle = &mut bundles[at];
            let (whole, part) = (whole.tensor.shallow_clone(), part.tensor.shallow_clone());
            bundle.members.push(Member { whole, part, from: bundle.width, touched: false });
            bundle.width += width;
        }
        let inner = Inner { group, bundles, place: Place::Away, reduced: false, reducing: Vec::new() };
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

    /// Sends the gradients of a backward to the parts, and gives the parameters up.
    pub(crate) fn reduce(&self) -> Result<()> {
        let mut inner = self.lock();
        inner.reduce()?;
        inner.release()
    }

    /// Adds what has come of reductions to the parts' gradients.
    pub(crate) fn settle(&self) -> Result<()> {
        self.lock().settle()
    }

    /// A backward is over: whatever it did not reach is reduced as well, so that all ranks do the same.
    pub(crate) fn end_backward(&self) -> Result<()> {
        let mut inner = self.lock();
        if !inner.reduced {
            inner.reduce()?;
        }
        inner.settle()?;
        inner.release()?;
        inner.reduced = false;
        Ok(())
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
            let group = &self.group;
            let coming = self.bundles.iter().map(|bundle| bundle.gather(group)).collect::<Result<_>>()?;
            self.place = Place::Coming(coming);
        }
        Ok(())
    }

    fn need(&mut self) -> Result<()> {
        self.start()?;
        if let Place::Coming(coming) = std::mem::replace(&mut self.place, Place::Here) {
            for (bundle, (gathered, pending)) in self.bundles.iter().zip(coming) {
                pending.wait()?;
                bundle.fill(&gathered, self.group.size())?;
            }
        }
        Ok(())
    }

    fn release(&mut self) -> Result<()> {
        match std::mem::replace(&mut self.place, Place::Away) {
            Place::Away => {}
            Place::Coming(coming) => coming.into_iter().try_for_each(|(_, pending)| pending.wait())?,
            Place::Here => {
                for member in self.bundles.iter().flat_map(|bundle| &bundle.members) {
                    torch::storage::free(&member.whole)?;
                }
            }
        }
        Ok(())
    }

    fn reduce(&mut self) -> Result<()> {
        self.reduced = true;
        for (index, bundle) in self.bundles.iter_mut().enumerate() {
            if bundle.members.iter().any(|member| member.part.requires_grad()) {
                let (output, pending) = bundle.scatter(&self.group)?;
                self.reducing.push(Reducing { bundle: index, output, pending });
            }
        }
        Ok(())
    }

    fn settle(&mut self) -> Result<()> {
        for Reducing { bundle, output, pending } in std::mem::take(&mut self.reducing) {
            pending.wait()?;
            for member in &self.bundles[bundle].members {
                let came = output.f_narrow(0, member.from as i64, member.part.numel() as i64)?;
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
    /// Starts to put the ranks' stretches end to end.
    fn gather(&self, group: &Group) -> Result<(Tensor, Pending)> {
        let options = (self.kind, self.device());
        let own = Tensor::f_zeros([self.width as i64], options)?;
        for member in &self.members {
            let mut place = own.f_narrow(0, member.from as i64, member.part.numel() as i64)?;
            tch::no_grad(|| place.f_copy_(&member.part))?;
        }
        let gathered = Tensor::f_empty([(self.width * group.size()) as i64], options)?;
        let pending = group.all_gather(&gathered, &own)?;
        Ok((gathered, pending))
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

    /// Starts to add up the ranks' gradients in f32, each rank its own stretch of the sum.
    fn scatter(&mut self, group: &Group) -> Result<(Tensor, Pending)> {
        let (ranks, width, options) = (group.size(), self.width, (Kind::Float, self.device()));
        let input = Tensor::f_zeros([(width * ranks) as i64], options)?;
        for member in &mut self.members {
            let gradient = member.whole.grad();
            if !gradient.defined() {
                continue;
            }
            member.touched = true;
            let gradient = gradient.f_reshape([-1])?;
            for (from, to, length) in member.shares(ranks, width) {
                tch::no_grad(|| input.f_narrow(0, to, length)?.f_copy_(&gradient.f_narrow(0, from, length)?))?;
            }
            torch::autograd::set_gradient(&member.whole, None)?;
        }
        let output = Tensor::f_empty([width as i64], options)?;
        let pending = group.reduce_scatter(&output, &input)?;
        Ok((output, pending))
    }

    fn device(&self) -> Device {
        self.members.first().map_or(Device::Cpu, |member| member.part.device())
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
