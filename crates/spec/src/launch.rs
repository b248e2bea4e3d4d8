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

/// Names of the same four numbers by other launchers: Slurm's `srun`, Open MPI, and MPICH with its kin.
const OTHERS: [[&str; 4]; 3] = [
    ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"],
    ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"],
    ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"],
];

impl Launch {
    /// The only rank.
    pub fn alone() -> Self {
        Self { rank: 0, world: 1, local_rank: 0, local_world: 1, meeting: None }
    }

    /// Reads [`VARIABLES`] through `get`. Where `MASTER_ADDR` is set and `RANK` is not, the numbers may be another
    /// launcher's: a job script alone also sees Slurm's, but sets no meeting point.
    pub fn read(get: impl Fn(&str) -> Option<String>) -> Result<Self, Problem> {
        let get = |name: &str| get(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty());
        let [rank, world, local_rank, local_world, host, port] = VARIABLES;
        let has_host = get(host).is_some();
        if get(rank).is_none() && get(world).is_none() && !has_host {
            return Ok(Self::alone());
        }
        let own = [rank, world, local_rank, local_world];
        let others = OTHERS.into_iter().find(|names| has_host && get(rank).is_none() && get(names[0]).is_some());
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
        let address = get(host).ok_or_else(|| {
            Problem::new(format!("`{host}` is not set, and {} must meet somewhere", counted(size, "rank")))
                .help(format!("set `{host}` and `{port}` to an address of rank 0 and a free port there"))
        })?;
        let port = u16::try_from(number(port)?)
            .map_err(|_| Problem::new(format!("the environment has a `{port}` above 65535")))?;
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
    fn srun_is_understood_if_it_names_a_meeting_point() {
        let slurm = [("SLURM_PROCID", "1"), ("SLURM_NTASKS", "2"), ("SLURM_LOCALID", "0")];
        assert_eq!(read(&slurm).unwrap(), Launch::alone());
        let launch = read(&[&slurm[..], &[("MASTER_ADDR", "a"), ("MASTER_PORT", "1")]].concat()).unwrap();
        assert_eq!((launch.rank, launch.world, launch.local_rank, launch.local_world), (1, 2, 0, 1));
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
