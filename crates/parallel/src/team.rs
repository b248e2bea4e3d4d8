//! The ranks of a run on their mesh, and the small things they tell each other: counts, flags, losses.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use comm::{Group, Reduction, World};
use spec::mesh::Axis;
use spec::{Launch, Mesh, counted};
use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result};

/// This rank among those of the run, or among those that hold the same of its models. Members are counted from 0.
#[derive(Debug)]
pub struct Team {
    world: Rc<World>,
    /// The run's rank of each member.
    ranks: Vec<usize>,
    /// Which of them this is.
    index: usize,
    mesh: Mesh,
    everyone: Arc<Group>,
    data: Arc<Group>,
    device: Device,
}

impl Team {
    /// One rank.
    pub fn alone() -> Result<Self> {
        Self::on(Rc::new(World::alone()), vec![0], Mesh::alone(), Device::Cpu)
    }

    /// Meets the other ranks, each of which trains on its `device`; nothing between ranks ever takes longer than `timeout`.
    pub fn join(launch: &Launch, mesh: Mesh, timeout: Duration, device: Device) -> Result<Self> {
        let world = World::join(launch, timeout, device)?;
        let ranks = (0..world.size()).collect();
        Self::on(Rc::new(world), ranks, mesh, device)
    }

    fn on(world: Rc<World>, ranks: Vec<usize>, mesh: Mesh, device: Device) -> Result<Self> {
        let index = ranks.iter().position(|rank| *rank == world.rank());
        let Some(index) = index.filter(|_| ranks.len() == mesh.world()) else {
            return Err(Error::Unfit(format!("a mesh of {mesh} for {}", counted(ranks.len(), "rank"))));
        };
        let data: Vec<usize> = mesh.data_group(index).into_iter().map(|member| ranks[member]).collect();
        let (everyone, data) = (world.group(&ranks)?, world.group(&data)?);
        Ok(Self { world, ranks, index, mesh, everyone, data, device })
    }

    /// The members at this one's place along `axis`, as a team of their own, to which the axis does not exist. All must ask at the
    /// same point.
    pub fn apart(&self, axis: Axis) -> Result<Self> {
        let others: Vec<Axis> = Axis::ALL.into_iter().filter(|other| *other != axis).collect();
        let ranks = self.ranks(&others).into_iter().map(|member| self.ranks[member]).collect();
        Self::on(Rc::clone(&self.world), ranks, self.mesh.with(axis, 1), self.device)
    }

    /// Whether this rank writes what is written once.
    pub fn leads(&self) -> bool {
        self.index == 0
    }

    /// Where this rank's activations are, if it is one of several.
    pub(crate) fn device(&self) -> Device {
        self.device
    }

    /// The mesh.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// Which share of the data is this rank's, of how many.
    pub fn share(&self) -> (usize, usize) {
        (self.data.index(), self.data.size())
    }

    /// This rank's place along an axis, and the axis's degree.
    pub fn place(&self, axis: Axis) -> (usize, usize) {
        (self.mesh.coordinates(self.index)[axis as usize], self.mesh.degree(axis))
    }

    /// The members that differ from this one along `axes` at most. All must ask for the same axes.
    pub fn along(&self, axes: &[Axis]) -> Result<Arc<Group>> {
        self.group(&self.ranks(axes))
    }

    /// As [`along`](Self::along), which they are.
    pub(crate) fn ranks(&self, axes: &[Axis]) -> Vec<usize> {
        self.mesh.group(self.index, axes)
    }

    /// The group of these members, of which this is one; all of them must ask for it.
    pub fn group(&self, members: &[usize]) -> Result<Arc<Group>> {
        let ranks: Vec<usize> = members.iter().map(|member| self.ranks[*member]).collect();
        Ok(self.world.group(&ranks)?)
    }

    /// Where the calls between ranks can be recorded.
    pub fn trace(&self) -> &comm::Trace {
        self.world.trace()
    }

    /// The ranks that see different samples.
    pub fn data(&self) -> &Arc<Group> {
        &self.data
    }

    /// Waits for all ranks.
    pub fn barrier(&self) -> Result<()> {
        Ok(self.everyone.barrier()?)
    }

    /// Whether the flag is set on any rank.
    pub fn any(&self, flag: bool) -> Result<bool> {
        Ok(self.greatest(f64::from(u8::from(flag)))? > 0.0)
    }

    /// The greatest of the ranks' numbers.
    pub fn greatest(&self, number: f64) -> Result<f64> {
        Ok(reduced(&self.everyone, &[number], Reduction::Max)?[0])
    }

    /// The sums over the shares of the data, place by place; ranks that work on the same samples count once.
    pub fn sums(&self, numbers: &[f64]) -> Result<Vec<f64>> {
        reduced(&self.data, numbers, Reduction::Sum)
    }

    /// `tensor` becomes the sum of all ranks' tensors.
    pub(crate) fn add_up(&self, tensor: &Tensor) -> Result<()> {
        Ok(self.everyone.all_reduce(tensor, Reduction::Sum)?.wait()?)
    }

    /// `tensor` becomes, element by element, the greatest of all ranks' tensors.
    pub(crate) fn most(&self, tensor: &Tensor) -> Result<()> {
        Ok(self.everyone.all_reduce(tensor, Reduction::Max)?.wait()?)
    }

    /// The sum along an axis of the members' numbers.
    pub fn sum_along(&self, axis: Axis, number: f64) -> Result<f64> {
        Ok(reduced(self.along(&[axis])?.as_ref(), &[number], Reduction::Sum)?[0])
    }

    /// The sum of the ranks' numbers.
    pub(crate) fn total(&self, number: f64) -> Result<f64> {
        Ok(reduced(&self.everyone, &[number], Reduction::Sum)?[0])
    }

    /// Ranks that work on the same samples and each end up with their losses.
    pub fn redundancy(&self) -> usize {
        self.mesh.degree(Axis::Cp) * self.mesh.degree(Axis::Tp)
    }

    /// The numbers of every share of the data; all ranks know that share i has `counts[i]` of them.
    pub fn gather(&self, own: &[f32], counts: &[usize]) -> Result<Vec<Vec<f32>>> {
        let widest = counts.iter().max().copied().unwrap_or(0) as i64;
        let padded = Tensor::f_zeros([widest], (Kind::Float, Device::Cpu))?;
        padded.f_narrow(0, 0, own.len() as i64)?.f_copy_(&Tensor::f_from_slice(own)?)?;
        let all = Tensor::f_zeros([widest * counts.len() as i64], (Kind::Float, Device::Cpu))?;
        self.data.all_gather(&all, &padded)?.wait()?;
        let rows = all.f_view([counts.len() as i64, widest])?;
        let row = |(share, count): (usize, &usize)| {
            Ok(Vec::try_from(rows.f_get(share as i64)?.f_narrow(0, 0, *count as i64)?.f_contiguous()?)?)
        };
        counts.iter().enumerate().map(row).collect()
    }

    /// Fails on every rank unless all have the same `value` of `what`.
    pub fn same(&self, what: &str, value: u64) -> Result<()> {
        let own = Tensor::f_from_slice(&[value as i64])?;
        let all = Tensor::f_zeros([self.everyone.size() as i64], (Kind::Int64, Device::Cpu))?;
        self.everyone.all_gather(&all, &own)?.wait()?;
        let all: Vec<i64> = Vec::try_from(all)?;
        let (rank, world) = (self.world.rank(), self.world.size());
        match all.iter().position(|other| *other != value as i64) {
            Some(other) => Err(Error::Differ { rank, world, what: what.to_owned(), other: self.ranks[other] }),
            None => Ok(()),
        }
    }

    /// Ends checked mode: from now on the calls of one step are those of the last.
    pub fn trust(&self) {
        self.world.trust();
    }

    /// Parts from the others, who all succeeded, too.
    pub fn leave(self) -> Result<()> {
        Ok(self.world.leave()?)
    }
}

fn reduced(group: &Group, numbers: &[f64], reduction: Reduction) -> Result<Vec<f64>> {
    let tensor = Tensor::f_from_slice(numbers)?;
    group.all_reduce(&tensor, reduction)?.wait()?;
    Ok(Vec::try_from(tensor)?)
}
