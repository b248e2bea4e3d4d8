//! Who a process is among the ranks of a run, as launchers say it in the environment. Opens no connection.

use crate::{Problem, counted};

/// One rank's place. A process that nobody launched as a rank is alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launch {
    /// From 0.
    pub rank: usize,
    /// Ranks in all.
    pub world: usize,
    /// Among the ranks of this host, from 0; decides which GPU is this rank's.
    pub local_rank: usize,
    /// Ranks of this host.
    pub local_world: usize,
    /// Where ranks meet; none if there is but one.
    pub meeting: Option<Meeting>,
}

/// Where the ranks' key-value store is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Meeting {
    /// Host name or address.
    pub host: String,
    /// TCP port.
    pub port: u16,
    /// Whether the launcher serves the store; else rank 0 does.
    pub served: bool,
    /// Start of all keys, so that a restart does not read what an earlier try left in the launcher's store.
    pub prefix: String,
}

/// The variables that say a rank's place in full, as `torchrun` sets them.
pub const VARIABLES: [&str; 6] = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"];

/// Another launcher: its names of the same four numbers, and of the number by which it says that a process is one of several ranks.
type Launcher = ([&'static str; 4], &'static str);

const SLURM: Launcher =
    (["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"], "SLURM_STEP_NUM_TASKS");
const OPEN_MPI: Launcher = (
    ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"],
    "OMPI_COMM_WORLD_SIZE",
);
/// And its kin.
const MPICH: Launcher = (["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"], "PMI_SIZE");

/// What a process that starts ranks of its own keeps from them: by which they would be another's.
pub const OF_LAUNCHERS: [&str; 5] =
    [SLURM.1, OPEN_MPI.1, MPICH.1, "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"];

impl Launch {
    /// The only rank.
    pub fn alone() -> Self {
        Self { rank: 0, world: 1, local_rank: 0, local_world: 1, meeting: None }
    }

    /// Reads [`VARIABLES`] through `get`. Where `RANK` is not set, the numbers may be another launcher's. Slurm's count with a
    /// meeting point, or in a step of several tasks, which meets on its first node: a job script by itself sees them, too.
    pub fn read(get: impl Fn(&str) -> Option<String>) -> Result<Self, Problem> {
        let get = |name: &str| get(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty());
        let [rank, world, local_rank, local_world, host, port] = VARIABLES;
        let has_host = get(host).is_some();
        let launched = |count: &str| has_host || get(count).is_some_and(|size| size != "1");
        // Within a job of Slurm's, ranks of `mpirun` see its numbers, too: those of the job, or of what starts the ranks. But `srun`
        // may speak for MPICH, with the same numbers.
        let by_slurm = get(MPICH.1).is_none_or(|size| get(SLURM.1) == Some(size));
        let order = if by_slurm { [OPEN_MPI, SLURM, MPICH] } else { [OPEN_MPI, MPICH, SLURM] };
        let found = order.into_iter().find(|(names, several)| get(names[0]).is_some() && launched(several));
        let others = found.map(|(names, _)| names).filter(|_| get(rank).is_none());
        if get(rank).is_none() && get(world).is_none() && !has_host && others.is_none() {
            return Ok(Self::alone());
        }
        let own = [rank, world, local_rank, local_world];
        let names = others.unwrap_or(own);
        let number = |name: &str| -> Result<usize, Problem> {
            let text = get(name).ok_or_else(|| {
                let message = format!("`{name}` is not set, but other variables of a run on several ranks are");
                Problem::new(message).help(format!("set {}, or none of them", VARIABLES.join(", ")))
            })?;
            let wrong = || Problem::new(format!("the environment has `{name}={text}`, which is no whole number"));
            text.parse().map_err(|_| wrong())
        };
        let (place, size) = (number(names[0])?, number(names[1])?);
        if place >= size {
            return Err(Problem::new(format!(
                "`{}` is {place}, but there are only {}, counted from 0",
                names[0],
                counted(size, "rank")
            )));
        }
        // Absent on launchers that give every rank a host of its own.
        let optional = |name: &str, absent| if get(name).is_some() { number(name) } else { Ok(absent) };
        let local = optional(names[2], 0)?;
        let here = optional(names[3], local + 1)?;
        if size == 1 {
            return Ok(Self::alone());
        }
        // A step of Slurm's needs no meeting point of the user's; on one node, steps do not meet each other.
        let step = get("SLURM_STEP_NODELIST").filter(|_| others == Some(SLURM.0) && !has_host);
        let address = get(host).or_else(|| step.as_deref().map(first_node)).ok_or_else(|| {
            Problem::new(format!("`{host}` is not set, and {} must meet somewhere", counted(size, "rank")))
                .help(format!("set `{host}` and `{port}` to an address of rank 0 and a free port there"))
        })?;
        let chosen = if step.is_some() && get(port).is_none() {
            20_000 + (optional("SLURM_JOB_ID", 0)? * 31 + optional("SLURM_STEP_ID", 0)?) % 10_000
        } else {
            number(port)?
        };
        let port =
            u16::try_from(chosen).map_err(|_| Problem::new(format!("the environment has a `{port}` above 65535")))?;
        let is = |name: &str, value: &str| get(name).is_some_and(|text| text.eq_ignore_ascii_case(value));
        let attempt = get("TORCHELASTIC_RESTART_COUNT").unwrap_or_default();
        let meeting = Meeting {
            host: address,
            port,
            served: is("TORCHELASTIC_USE_AGENT_STORE", "true"),
            prefix: format!("try{attempt}"),
        };
        Ok(Self { rank: place, world: size, local_rank: local, local_world: here, meeting: Some(meeting) })
    }

    /// `rank 1 of 4`.
    pub fn title(&self) -> String {
        format!("rank {} of {}", self.rank, self.world)
    }
}

/// `node07` of Slurm's `node[07-09,12],other`.
fn first_node(nodes: &str) -> String {
    let (name, rest) = nodes.split_at(nodes.find(['[', ',']).unwrap_or(nodes.len()));
    let number = rest.strip_prefix('[').map_or("", |rest| rest.split([',', '-', ']']).next().unwrap_or(""));
    format!("{name}{number}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pairs: &[(&str, &str)]) -> Result<Launch, Problem> {
        Launch::read(|name| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned()))
    }

    #[test]
    fn torchrun_is_understood() {
        let torchrun = [
            ("RANK", "3"),
            ("WORLD_SIZE", "4"),
            ("LOCAL_RANK", "1"),
            ("LOCAL_WORLD_SIZE", "2"),
            ("MASTER_ADDR", "node0"),
            ("MASTER_PORT", "29500"),
            ("TORCHELASTIC_USE_AGENT_STORE", "True"),
            ("TORCHELASTIC_RESTART_COUNT", "2"),
        ];
        let launch = read(&torchrun).unwrap();
        assert_eq!((launch.rank, launch.world, launch.local_rank, launch.local_world), (3, 4, 1, 2));
        let meeting = Meeting { host: "node0".to_owned(), port: 29500, served: true, prefix: "try2".to_owned() };
        assert_eq!(launch.meeting, Some(meeting));
        assert_eq!(launch.title(), "rank 3 of 4");
    }

    #[test]
    fn srun_is_understood_and_meets_on_its_first_node() {
        let slurm = [("SLURM_PROCID", "1"), ("SLURM_NTASKS", "2"), ("SLURM_LOCALID", "0")];
        assert_eq!(read(&slurm).unwrap(), Launch::alone(), "a job script");
        let launch = read(&[&slurm[..], &[("MASTER_ADDR", "a"), ("MASTER_PORT", "1")]].concat()).unwrap();
        assert_eq!((launch.rank, launch.world, launch.local_rank, launch.local_world), (1, 2, 0, 1));
        let step = [("SLURM_STEP_NUM_TASKS", "2"), ("SLURM_STEP_NODELIST", "node[07-09,12],b"), ("SLURM_JOB_ID", "3")];
        let launch = read(&[&slurm[..], &step].concat()).unwrap();
        let meeting = launch.meeting.unwrap();
        assert_eq!((launch.rank, launch.world, meeting.host.as_str(), meeting.port), (1, 2, "node07", 20_093));
        assert_eq!(["vm", "a,b", "n[1,3]", "gpu-[001]x"].map(first_node), ["vm", "a", "n1", "gpu-001"]);
        let one = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "1"), ("SLURM_STEP_NUM_TASKS", "1")];
        assert_eq!(read(&one).unwrap(), Launch::alone());
    }

    /// Else each would take itself for the only one, and all would write one result.
    #[test]
    fn ranks_of_mpirun_must_be_told_where_to_meet() {
        let mpi = [("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "2"), ("OMPI_COMM_WORLD_LOCAL_RANK", "1")];
        let problem = read(&mpi).unwrap_err();
        assert!(problem.message.contains("`MASTER_ADDR` is not set, and 2 ranks must meet"), "{problem:?}");
        let launch = read(&[&mpi[..], &[("MASTER_ADDR", "a"), ("MASTER_PORT", "1")]].concat()).unwrap();
        assert_eq!((launch.rank, launch.world), (1, 2));
        assert_eq!(read(&[("PMI_RANK", "0"), ("PMI_SIZE", "1")]).unwrap(), Launch::alone());
    }

    /// The job's numbers are one and the same in all ranks, and the step's are those of what starts them.
    #[test]
    fn mpirun_within_a_job_of_slurms_is_heard_first() {
        let job = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "1")];
        let step = [("SLURM_STEP_NUM_TASKS", "2"), ("SLURM_STEP_NODELIST", "a,b"), ("SLURM_LOCALID", "0")];
        let open_mpi = [("OMPI_COMM_WORLD_RANK", "3"), ("OMPI_COMM_WORLD_SIZE", "4")];
        let mpich = [("PMI_RANK", "3"), ("PMI_SIZE", "4")];
        for mpi in [open_mpi, mpich] {
            for launch in [[&job[..], &mpi].concat(), [&job[..], &step, &mpi].concat()] {
                let launch = read(&launch).unwrap();
                assert_eq!((launch.rank, launch.world), (3, 4), "{mpi:?}");
            }
        }
        // `srun --mpi=pmi2`.
        let own = [("SLURM_PROCID", "1"), ("SLURM_NTASKS", "2"), ("PMI_RANK", "1"), ("PMI_SIZE", "2")];
        let launch = read(&[&own[..], &step].concat()).unwrap();
        assert_eq!((launch.rank, launch.world, launch.meeting.unwrap().host.as_str()), (1, 2, "a"));
    }

    #[test]
    fn one_rank_is_alone_and_half_a_launch_is_a_mistake() {
        assert_eq!(read(&[]).unwrap(), Launch::alone());
        assert_eq!(read(&[("RANK", "0"), ("WORLD_SIZE", "1")]).unwrap(), Launch::alone());
        let message = |pairs: &[(&str, &str)]| read(pairs).unwrap_err().message;
        assert!(message(&[("RANK", "0")]).contains("`WORLD_SIZE` is not set"));
        assert!(message(&[("RANK", "0"), ("WORLD_SIZE", "2")]).contains("`MASTER_ADDR` is not set"));
        assert!(message(&[("RANK", "2"), ("WORLD_SIZE", "2")]).contains("`RANK` is 2"));
        assert!(message(&[("RANK", "x"), ("WORLD_SIZE", "2")]).contains("`RANK=x`"));
    }
}
