//! A group of ranks and its collectives. Each call starts in the background and is done when its [`Pending`] is.
//!
//! All members must make the same calls in the same order. In checked mode, the mode a group begins in, they compare
//! notes before each call, so that a difference is an error on all of them; afterwards a run that repeats its calls may
//! [go without](Group::trust).

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tch::{Device, Kind, Tensor};
use torch::distributed::{self, Reduction, Work};

use crate::delay::Delays;
use crate::error::{Error, Result};
use crate::first_call::FirstCalls;
use crate::trace::Trace;

/// Who this rank is in a group.
#[derive(Debug, Clone)]
pub(crate) struct Member {
    pub(crate) rank: usize,
    pub(crate) world: usize,
    /// Place in `ranks`.
    pub(crate) index: usize,
    pub(crate) ranks: Vec<usize>,
}

impl Member {
    pub(crate) fn lost(&self, call: &str, error: &torch::Error) -> Error {
        let reason = error.to_string();
        let reason = reason.strip_prefix("libtorch: ").unwrap_or(&reason).to_owned();
        Error::Lost { rank: self.rank, world: self.world, call: call.to_owned(), with: self.ranks.clone(), reason }
    }
}

/// Ranks that act together.
#[derive(Debug)]
pub struct Group {
    member: Member,
    /// `None` for a single rank. Calls are made one at a time, in order.
    backend: Option<Mutex<distributed::Group>>,
    timeout: Duration,
    calls: AtomicU64,
    checked: AtomicBool,
    trace: Arc<Trace>,
    delays: Arc<Delays>,
    first_calls: Option<FirstCalls>,
}

/// A collective under way; its tensors are settled after [`Pending::wait`].
#[derive(Debug)]
#[must_use = "a collective is over when it was waited for"]
pub struct Pending {
    works: Vec<Work>,
    member: Member,
    call: String,
    timeout: Duration,
    /// Comes before it.
    before: Option<Box<Pending>>,
}

impl Pending {
    /// Until it is done on this rank.
    pub fn wait(self) -> Result<()> {
        let Self { works, member, call, timeout, before } = self;
        before.map_or(Ok(()), |before| before.wait())?;
        works.into_iter().try_for_each(|work| work.wait(timeout)).map_err(|error| member.lost(&call, &error))
    }
}

/// A [reduce-scatter in place](Group::reduce_scatter_in_place) under way.
#[derive(Debug)]
#[must_use = "a collective is over when it was waited for"]
pub struct Scattered {
    pending: Pending,
    /// What is to be added up.
    addends: Vec<Tensor>,
}

impl Scattered {
    /// This member's stretch of the sum, f32, in memory of its own.
    pub fn wait(self) -> Result<Tensor> {
        let Self { pending, addends } = self;
        pending.wait()?;
        tch::no_grad(|| {
            let mut sum = addends[0].f_to_kind(Kind::Float)?;
            for addend in &addends[1..] {
                let _ = sum.f_add_(addend)?;
            }
            Ok(sum)
        })
    }
}

/// What one rank asks for, as numbers that ranks can compare.
type Note = [i64; 5];

/// Names of calls, by their first number in a [`Note`].
const CALLS: [&str; 8] =
    ["all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "barrier", "send", "receive"];
/// Places in [`CALLS`].
const SEND: usize = 6;
const RECEIVE: usize = 7;

impl Group {
    pub(crate) fn new(
        member: Member,
        backend: Option<distributed::Group>,
        timeout: Duration,
        trace: Arc<Trace>,
        delays: Arc<Delays>,
        first_calls: Option<FirstCalls>,
    ) -> Self {
        let (backend, calls, checked) = (backend.map(Mutex::new), AtomicU64::new(0), AtomicBool::new(true));
        Self { member, backend, timeout, calls, checked, trace, delays, first_calls }
    }

    /// Members.
    pub fn size(&self) -> usize {
        self.member.ranks.len()
    }

    /// This rank's place among them.
    pub fn index(&self) -> usize {
        self.member.index
    }

    /// The members' ranks.
    pub fn ranks(&self) -> &[usize] {
        &self.member.ranks
    }

    /// Ends checked mode, on all members at the same point.
    pub fn trust(&self) {
        self.checked.store(false, Ordering::Relaxed);
    }

    /// `tensor` becomes the reduction of all members' tensors.
    pub fn all_reduce(&self, tensor: &Tensor, reduction: Reduction) -> Result<Pending> {
        self.start(tensor, [0, reduction as i64, kind_number(tensor), tensor.numel() as i64, 0], |backend| {
            backend.all_reduce(tensor, reduction)
        })
    }

    /// `tensor` becomes that of member `root`.
    pub fn broadcast(&self, tensor: &Tensor, root: usize) -> Result<Pending> {
        self.must(root < self.size(), "broadcast", || format!("there is no member {root} of {}", self.size()))?;
        self.start(tensor, [1, root as i64, kind_number(tensor), tensor.numel() as i64, 0], |backend| {
            backend.broadcast(tensor, root)
        })
    }

    /// `output` becomes all members' inputs, one after the other.
    pub fn all_gather(&self, output: &Tensor, input: &Tensor) -> Result<Pending> {
        self.must_fit("all_gather", output, input)?;
        if self.backend.is_none() {
            copy(output, input)?;
        }
        let (to, from) = (output.f_view(-1)?, input.f_view(-1)?);
        self.start(input, [2, 0, kind_number(input), input.numel() as i64, 0], |backend| backend.all_gather(&to, &from))
    }

    /// `output` becomes this member's share of the sum of all inputs.
    pub fn reduce_scatter(&self, output: &Tensor, input: &Tensor) -> Result<Pending> {
        self.must_fit("reduce_scatter", input, output)?;
        if self.backend.is_none() {
            copy(output, input)?;
        }
        let (to, from) = (output.f_view(-1)?, input.f_view(-1)?);
        self.start(input, [3, 0, kind_number(input), input.numel() as i64, 0], |backend| {
            backend.reduce_scatter(&to, &from)
        })
    }

    /// `stretches` has as wide a stretch for each member, one after the other; all but this member's own become theirs. Unlike
    /// with Gloo's all-gather, nothing is held twice.
    pub fn all_gather_in_place(&self, stretches: &Tensor) -> Result<Pending> {
        let own = self.stretch("all_gather", stretches, self.index())?;
        if own.device().is_cuda() {
            return self.start(&own, [2, 0, kind_number(&own), own.numel() as i64, 0], |backend| {
                backend.all_gather(stretches, &own)
            });
        }
        let stretch = |member: usize| Ok(vec![self.stretch("all_gather", stretches, member)?]);
        self.all_gather_pieces(&(0..self.size()).map(stretch).collect::<Result<Vec<_>>>()?)
    }

    /// Each member has pieces, contiguous tensors in host memory, and all but this member's own become theirs.
    pub fn all_gather_pieces(&self, pieces: &[Vec<Tensor>]) -> Result<Pending> {
        self.must(pieces.len() == self.size(), "all_gather", || format!("pieces of {} members", pieces.len()))?;
        let own = &pieces[self.index()];
        let all = || pieces.iter().flatten();
        let (kind, count) = (all().next().map_or(-1, kind_number), all().map(Tensor::numel).sum::<usize>());
        self.begin(own.iter().map(bytes).sum(), [2, 0, kind, count as i64, 0], |backend| {
            self.exchange(backend, |_| own.as_slice(), |member| pieces[member].as_slice())
        })
    }

    /// Begins to add up all members' stretches for this one; `stretches` is of no use afterwards. Unlike with Gloo's reduce-scatter,
    /// only what comes from the others is held beside it; it is added up in f32 in the order of the members that it came from.
    pub fn reduce_scatter_in_place(&self, stretches: &Tensor) -> Result<Scattered> {
        let there = (0..self.size()).map(|member| Ok([self.stretch("reduce_scatter", stretches, member)?]));
        let there = there.collect::<Result<Vec<_>>>()?;
        let [own] = &there[self.index()];
        let note = [3, 0, kind_number(stretches), stretches.numel() as i64, 0];
        // A single rank has no backend that would write a sum.
        if own.device().is_cuda() && self.backend.is_some() {
            let sum = own.f_empty_like()?;
            let pending = self.start(stretches, note, |backend| backend.reduce_scatter(&sum, stretches))?;
            return Ok(Scattered { pending, addends: vec![sum] });
        }
        let here = (0..self.size()).map(|_| Ok([own.f_empty_like()?])).collect::<Result<Vec<_>>>()?;
        let pending = self.begin(bytes(stretches), note, |backend| {
            self.exchange(backend, |member| &there[member], |member| &here[member])
        })?;
        let came = here.into_iter().enumerate().filter(|(member, _)| *member != self.index());
        let mut addends: Vec<Tensor> = came.flat_map(|(_, came)| came).collect();
        addends.push(if addends.is_empty() { own.f_to_dtype(own.kind(), false, true)? } else { own.shallow_clone() });
        Ok(Scattered { pending, addends })
    }

    /// Every other member gets `there(member)`, and `here(member)` becomes what comes from it. What is empty, nobody sends.
    fn exchange<'t>(
        &self,
        backend: &distributed::Group,
        there: impl Fn(usize) -> &'t [Tensor],
        here: impl Fn(usize) -> &'t [Tensor],
    ) -> Result<Vec<Work>> {
        let (own, size) = (self.index(), self.size());
        let mut works = Vec::new();
        // Not all to the same one first.
        for by in 1..size {
            let (from, to) = ((own + size - by) % size, (own + by) % size);
            for tensor in here(from).iter().filter(|tensor| tensor.numel() > 0) {
                works.push(backend.receive(tensor, from)?);
            }
            for tensor in there(to).iter().filter(|tensor| tensor.numel() > 0) {
                works.push(backend.send(tensor, to)?);
            }
        }
        Ok(works)
    }

    /// Member `member`'s stretch of a flat tensor.
    fn stretch(&self, call: &str, stretches: &Tensor, member: usize) -> Result<Tensor> {
        let (count, size) = (stretches.numel(), self.size());
        self.must(count.is_multiple_of(size) && stretches.dim() == 1, call, || {
            format!("{:?} elements for {size} members", stretches.size())
        })?;
        Ok(stretches.f_narrow(0, (member * (count / size)) as i64, (count / size) as i64)?)
    }

    /// Row ranges of `input` go to the members, `sent[i]` rows to member i; `output` collects `received[i]` rows from each.
    pub fn all_to_all(&self, output: &Tensor, input: &Tensor, received: &[i64], sent: &[i64]) -> Result<Pending> {
        let rows = |tensor: &Tensor| tensor.size().first().copied().unwrap_or(0);
        let fits = [(input, sent), (output, received)]
            .into_iter()
            .all(|(tensor, counts)| counts.len() == self.size() && counts.iter().sum::<i64>() == rows(tensor));
        self.must(fits && input.kind() == output.kind(), "all_to_all", || {
            format!("{sent:?} rows of {:?} to {received:?} rows of {:?}", input.size(), output.size())
        })?;
        if self.backend.is_none() {
            copy(output, input)?;
        }
        let width = input.size().iter().skip(1).product();
        self.start(input, [4, width, kind_number(input), 0, 0], |backend| {
            backend.all_to_all(output, input, received, sent)
        })
    }

    /// Done when every member has come.
    pub fn barrier(&self) -> Result<()> {
        self.start(&Tensor::f_empty([0], (Kind::Uint8, Device::Cpu))?, [5, 0, 0, 0, 0], distributed::Group::barrier)?
            .wait()
    }

    /// `tensor` goes to member `to`, which [receives](Self::receive) it. Not a call of the whole group: only the two take part,
    /// and what one sends the other must come in the order in which it is received.
    pub fn send(&self, tensor: &Tensor, to: usize) -> Result<Pending> {
        self.delays.pause();
        let backend = self.between("send", to)?;
        let name = format!("send to member {to}");
        let lost = |error: torch::Error| self.member.lost(&name, &error);
        // The receiver holds the note against what it expects; the sender need not wait for it.
        let before = if self.checked.load(Ordering::Relaxed) {
            let note = Tensor::f_from_slice(&[kind_number(tensor), tensor.numel() as i64])?;
            Some(Box::new(self.pending(&name, vec![backend.send(&note, to).map_err(lost)?], None)))
        } else {
            None
        };
        self.trace.note(CALLS[SEND], self.size(), bytes(tensor));
        self.first_calls.as_ref().map_or(Ok(()), |first| first.before(self.index(), to, true)).map_err(lost)?;
        let work = backend.send(tensor, to).map_err(lost)?;
        Ok(self.pending(&name, vec![work], before))
    }

    /// `tensor` becomes what member `from` [sends](Self::send).
    pub fn receive(&self, tensor: &Tensor, from: usize) -> Result<Pending> {
        self.delays.pause();
        let backend = self.between("receive", from)?;
        let name = format!("receive from member {from}");
        let lost = |error: torch::Error| self.member.lost(&name, &error);
        if self.checked.load(Ordering::Relaxed) {
            let note = Tensor::f_zeros([2], (Kind::Int64, Device::Cpu))?;
            backend.receive(&note, from).and_then(|work| work.wait(self.timeout)).map_err(lost)?;
            let sent = Vec::<i64>::try_from(note)?;
            let told = |kind: i64, count: i64| format!("{count} {}", kind_name(kind));
            if sent != [kind_number(tensor), tensor.numel() as i64] {
                let Member { rank, world, ref ranks, .. } = self.member;
                let (sent, wanted) = (told(sent[0], sent[1]), told(kind_number(tensor), tensor.numel() as i64));
                let calls = format!("rank {} sends {sent}; rank {rank} receives {wanted}", ranks[from]);
                return Err(Error::Mismatch { rank, world, calls });
            }
        }
        self.trace.note(CALLS[RECEIVE], self.size(), bytes(tensor));
        self.first_calls.as_ref().map_or(Ok(()), |first| first.before(self.index(), from, false)).map_err(lost)?;
        let work = backend.receive(tensor, from).map_err(lost)?;
        Ok(self.pending(&name, vec![work], None))
    }

    /// The backend, for a call with one other member.
    fn between(&self, call: &str, other: usize) -> Result<std::sync::MutexGuard<'_, distributed::Group>> {
        self.must(other < self.size() && other != self.index(), call, || format!("there is no other member {other}"))?;
        let backend = self.backend.as_ref().map(|backend| backend.lock().unwrap_or_else(PoisonError::into_inner));
        backend.ok_or_else(|| {
            let Member { rank, world, .. } = self.member;
            Error::Call { rank, world, call: call.to_owned(), reason: "a single rank".to_owned() }
        })
    }

    fn pending(&self, call: &str, works: Vec<Work>, before: Option<Box<Pending>>) -> Pending {
        Pending { works, member: self.member.clone(), call: call.to_owned(), timeout: self.timeout, before }
    }

    /// A call that is one of the backend's.
    fn start(
        &self,
        input: &Tensor,
        note: Note,
        call: impl FnOnce(&distributed::Group) -> torch::Result<Work>,
    ) -> Result<Pending> {
        self.begin(bytes(input), note, |backend| Ok(vec![call(backend)?]))
    }

    /// `bytes`: of this member's input.
    fn begin(
        &self,
        bytes: usize,
        mut note: Note,
        call: impl FnOnce(&distributed::Group) -> Result<Vec<Work>>,
    ) -> Result<Pending> {
        let number = self.calls.fetch_add(1, Ordering::Relaxed);
        let name = format!("{} {number}", CALLS[note[0] as usize]);
        let Some(backend) = &self.backend else { return Ok(self.pending(&name, Vec::new(), None)) };
        self.delays.pause();
        self.trace.note(CALLS[note[0] as usize], self.size(), bytes);
        let backend = backend.lock().unwrap_or_else(PoisonError::into_inner);
        if self.checked.load(Ordering::Relaxed) {
            note[4] = number as i64;
            self.compare(&backend, &note)?;
        }
        let works = call(&backend).map_err(|error| match error {
            Error::Torch(error) => self.member.lost(&name, &error),
            other => other,
        })?;
        Ok(self.pending(&name, works, None))
    }

    /// Fails on every member unless all are about to make the same call.
    fn compare(&self, backend: &distributed::Group, own: &Note) -> Result<()> {
        let notes = Tensor::f_zeros([(self.size() * own.len()) as i64], (Kind::Int64, Device::Cpu))?;
        let compared = backend.all_gather(&notes, &Tensor::f_from_slice(own)?).and_then(|work| work.wait(self.timeout));
        compared.map_err(|error| self.member.lost(&format!("{} {}", CALLS[own[0] as usize], own[4]), &error))?;
        let flat = Vec::<i64>::try_from(notes)?;
        if flat.chunks(own.len()).all(|note| note == own) {
            return Ok(());
        }
        let calls =
            flat.chunks(own.len()).zip(&self.member.ranks).map(|(note, rank)| format!("rank {rank} {}", told(note)));
        let Member { rank, world, .. } = self.member;
        Err(Error::Mismatch { rank, world, calls: calls.collect::<Vec<_>>().join("; ") })
    }

    fn must_fit(&self, call: &str, whole: &Tensor, part: &Tensor) -> Result<()> {
        let fits = whole.numel() == part.numel() * self.size() && whole.kind() == part.kind();
        self.must(fits, call, || {
            let shown = |tensor: &Tensor| format!("{} {:?}", tensor.numel(), tensor.kind());
            format!("{} for {} members of {}", shown(whole), self.size(), shown(part))
        })
    }

    fn must(&self, holds: bool, call: &str, reason: impl FnOnce() -> String) -> Result<()> {
        let Member { rank, world, .. } = self.member;
        if holds { Ok(()) } else { Err(Error::Call { rank, world, call: call.to_owned(), reason: reason() }) }
    }
}

/// `all_reduce 3 (sum, 12 Float)`.
fn told(note: &[i64]) -> String {
    let name = CALLS.get(note[0] as usize).copied().unwrap_or("an unknown call");
    let kind = kind_name(note[2]);
    let detail = match note[0] {
        0 => format!(" ({}, {} {kind})", ["sum", "max", "min"].get(note[1] as usize).unwrap_or(&"?"), note[3]),
        1 => format!(" (from member {}, {} {kind})", note[1], note[3]),
        2 | 3 => format!(" ({} {kind})", note[3]),
        4 => format!(" (rows of {} {kind})", note[1]),
        _ => String::new(),
    };
    format!("makes {name} {}{detail}", note[4])
}

const KINDS: [Kind; 9] = [
    Kind::Float,
    Kind::BFloat16,
    Kind::Half,
    Kind::Double,
    Kind::Int64,
    Kind::Int,
    Kind::Int16,
    Kind::Uint8,
    Kind::Bool,
];

/// What a GPU's tensors have above those of the host: the two go different ways, and would wait for each other for ever.
const ON_GPU: i64 = 16;

fn kind_number(tensor: &Tensor) -> i64 {
    let above = if tensor.device().is_cuda() { ON_GPU } else { 0 };
    KINDS.iter().position(|kind| *kind == tensor.kind()).map_or(-1, |place| place as i64 + above)
}

/// `Float`, `Float on a GPU`.
fn kind_name(number: i64) -> String {
    let kind = usize::try_from(number % ON_GPU).ok().and_then(|place| KINDS.get(place));
    kind.map_or_else(|| "?".to_owned(), |kind| format!("{kind:?}{}", if number < ON_GPU { "" } else { " on a GPU" }))
}

fn bytes(tensor: &Tensor) -> usize {
    tensor.numel() * tensor.kind().elt_size_in_bytes()
}

fn copy(to: &Tensor, from: &Tensor) -> Result<()> {
    tch::no_grad(|| to.f_view(-1)?.f_copy_(&from.f_view(-1)?))?;
    Ok(())
}
