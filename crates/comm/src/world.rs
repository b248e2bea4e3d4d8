//! All ranks of a run: how they meet and part, and the groups they form.

use std::collections::BTreeMap;
use std::net::UdpSocket;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use spec::{Launch, counted};
use tch::Device;
use torch::distributed::{self, Store};

use crate::delay::Delays;
use crate::error::{Error, Result};
use crate::first_call::FirstCalls;
use crate::group::{Group, Member};
use crate::trace::Trace;

/// This rank among all of them.
pub struct World {
    launch: Launch,
    meeting: Option<Meeting>,
    timeout: Duration,
    groups: Mutex<BTreeMap<Vec<usize>, Arc<Group>>>,
    trace: Arc<Trace>,
    delays: Arc<Delays>,
}

struct Meeting {
    /// The connection that may serve the others; must outlive them.
    _root: Store,
    store: Store,
    /// This host's address, as the others see it.
    address: String,
    /// Whether tensors of the groups may lie on GPUs.
    gpus: bool,
}

impl World {
    /// One rank; everything it asks of the others costs nothing.
    pub fn alone() -> Self {
        Self {
            launch: Launch::alone(),
            meeting: None,
            timeout: Duration::MAX,
            groups: Mutex::default(),
            trace: Arc::default(),
            delays: Arc::default(),
        }
    }

    /// Meets the other ranks of `launch`; neither this nor any later collective takes longer than `timeout`. Groups carry tensors
    /// of `device` beside those of the CPU.
    pub fn join(launch: &Launch, timeout: Duration, device: Device) -> Result<Self> {
        let Some(place) = launch.meeting.as_ref().filter(|_| launch.world > 1) else { return Ok(Self::alone()) };
        let gpus = device.is_cuda();
        if gpus {
            torch::device::load_nccl("cuda")?;
        }
        let meeting = format!("{}:{}", place.host, place.port);
        let because = |reason: String| {
            let (rank, world, meeting) = (launch.rank, launch.world, meeting.clone());
            Error::Meeting { rank, world, meeting, timeout, reason }
        };
        let failed = |error: torch::Error| because(error.to_string());
        let root = if launch.rank == 0 && !place.served {
            Store::serve(place.port, timeout).map(|(store, _)| store)
        } else {
            Store::connect(&place.host, place.port, timeout)
        }
        .map_err(failed)?;
        let store = root.prefixed(&place.prefix).map_err(failed)?;
        // Counted here, so that a rank which never comes is told as such, and not as a broken connection.
        let here = store.add("here", 1).map_err(failed)?;
        if here as usize == launch.world {
            store.set("all here", &[1]).map_err(failed)?;
        }
        if store.wait("all here", timeout).is_err() {
            let come = store.add("here", 0).map_err(failed)?;
            return Err(because(format!("only {come} of {} came", counted(launch.world, "rank"))));
        }
        let address = own_address(&place.host, place.port);
        let meeting = Some(Meeting { _root: root, store, address, gpus });
        let delays = Arc::new(Delays::asked(launch.rank));
        Ok(Self { launch: launch.clone(), meeting, timeout, groups: Mutex::default(), trace: Arc::default(), delays })
    }

    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.launch.rank
    }

    /// Ranks in all.
    pub fn size(&self) -> usize {
        self.launch.world
    }

    /// How this rank was started.
    pub fn launch(&self) -> &Launch {
        &self.launch
    }

    /// The group of all ranks.
    pub fn everyone(&self) -> Result<Arc<Group>> {
        self.group(&(0..self.size()).collect::<Vec<_>>())
    }

    /// The group of `ranks`, in this order; this rank must be one of them, and all of them must ask for it. Made once.
    pub fn group(&self, ranks: &[usize]) -> Result<Arc<Group>> {
        let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(group) = groups.get(ranks) {
            return Ok(Arc::clone(group));
        }
        let index = ranks.iter().position(|rank| *rank == self.rank()).ok_or_else(|| Error::Call {
            rank: self.rank(),
            world: self.size(),
            call: format!("group of ranks {ranks:?}"),
            reason: "this rank is not in it".to_owned(),
        })?;
        let member = Member { rank: self.rank(), world: self.size(), index, ranks: ranks.to_vec() };
        let mut first_calls = None;
        let backend = match self.meeting.as_ref().filter(|_| ranks.len() > 1) {
            None => None,
            Some(Meeting { store, address, gpus, .. }) => {
                let made = store.prefixed(&format!("group {ranks:?}")).and_then(|store| {
                    let group = distributed::Group::gloo(&store, index, ranks.len(), address, self.timeout)?;
                    if *gpus {
                        group.add_nccl(&store.prefixed("nccl")?, index, ranks.len(), self.timeout)?;
                    }
                    if self.delays.are_asked() {
                        first_calls = Some(FirstCalls::new(store.prefixed("first calls")?, self.timeout));
                    }
                    Ok(group)
                });
                Some(made.map_err(|error| member.lost("joining a group", &error))?)
            }
        };
        let (trace, delays) = (Arc::clone(&self.trace), Arc::clone(&self.delays));
        let group = Arc::new(Group::new(member, backend, self.timeout, trace, delays, first_calls));
        groups.insert(ranks.to_vec(), Arc::clone(&group));
        Ok(group)
    }

    /// Where the calls of all groups can be recorded.
    pub fn trace(&self) -> &Trace {
        &self.trace
    }

    /// Ends checked mode in all groups made so far, on all ranks at the same point.
    pub fn trust(&self) {
        let groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        groups.values().for_each(|group| group.trust());
    }

    /// Waits for the others before their store goes away with this rank. The last thing a rank does that succeeded.
    pub fn leave(&self) -> Result<()> {
        let Some(Meeting { store, .. }) = &self.meeting else { return Ok(()) };
        let member =
            Member { rank: self.rank(), world: self.size(), index: self.rank(), ranks: (0..self.size()).collect() };
        let left = store.add("left", 1).map_err(|error| member.lost("leaving", &error))?;
        if left as usize == self.size() {
            store.set("all left", &[1]).map_err(|error| member.lost("leaving", &error))?;
        } else if self.rank() == 0 {
            store.wait("all left", self.timeout).map_err(|error| member.lost("leaving", &error))?;
        }
        Ok(())
    }
}

impl std::fmt::Debug for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.launch.title())
    }
}

/// The address by which this host reaches the meeting point, hence the one at which it can be reached from there.
fn own_address(host: &str, port: u16) -> String {
    // Connecting a datagram socket sends nothing; it only looks up the route.
    let route = || {
        let any = if host.contains(':') { "[::]:0" } else { "0.0.0.0:0" };
        let socket = UdpSocket::bind(any).ok()?;
        socket.connect((host, port)).ok()?;
        Some(socket.local_addr().ok()?.ip().to_string())
    };
    route().unwrap_or_else(|| "127.0.0.1".to_owned())
}
