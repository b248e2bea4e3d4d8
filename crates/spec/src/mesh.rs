//! The mesh: how the ranks of a run are laid out along axes, and which of them act together. Arithmetic only.

use std::fmt;

use crate::{Problem, counted};

/// An axis of the mesh. Ranks that are neighbours on a later axis lie closer together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Axis {
    /// Experts: whole models for different samples, which share nothing but the step.
    Ep,
    /// Pipeline: consecutive blocks.
    Pp,
    /// Data, with whole copies of the parameters.
    DpReplicate,
    /// Data, with the parameters split.
    DpShard,
    /// Context: parts of the sequence.
    Cp,
    /// Tensor: parts of a layer.
    Tp,
}

impl Axis {
    /// All axes, outermost first.
    pub const ALL: [Self; 6] = [Self::Ep, Self::Pp, Self::DpReplicate, Self::DpShard, Self::Cp, Self::Tp];

    /// Short name, such as `dp_shard`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pp => "pp",
            Self::DpReplicate => "dp_replicate",
            Self::DpShard => "dp_shard",
            Self::Cp => "cp",
            Self::Tp => "tp",
            Self::Ep => "ep",
        }
    }
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A degree for each axis; their product is the number of ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mesh {
    degrees: [usize; 6],
    /// Along `cp`, groups of neighbours that form a ring; the ranks of a group trade heads.
    ring: usize,
}

/// Degrees as a training recipe asks for them, in the peer's keys; what is left out is found by division, or is 1.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Asked {
    /// `dp_size`: all data-parallel ranks, replicas included.
    pub dp: Option<usize>,
    /// `dp_replicate_size`.
    pub dp_replicate: Option<usize>,
    /// `cp_size`.
    pub cp: usize,
    /// `cp_ring_degree`.
    pub cp_ring: Option<usize>,
    /// `cp_ulysses_degree`.
    pub cp_ulysses: Option<usize>,
    /// `tp_size`.
    pub tp: usize,
    /// `pp_size`.
    pub pp: usize,
    /// `ep_size`.
    pub ep: usize,
    /// Whether parameters are split between data-parallel ranks (`fsdp`) or copied to all of them (`ddp`).
    pub sharded: bool,
}

impl Mesh {
    /// One rank.
    pub fn alone() -> Self {
        Self { degrees: [1; 6], ring: 1 }
    }

    /// Whole copies on `ranks` ranks.
    pub fn replicated(ranks: usize) -> Self {
        Self::alone().with(Axis::DpReplicate, ranks)
    }

    /// This mesh with another degree along `axis`; along `cp`, ranks trade heads.
    #[must_use]
    pub fn with(mut self, axis: Axis, degree: usize) -> Self {
        self.degrees[axis as usize] = degree;
        self
    }

    /// The mesh that `asked` means on `world` ranks; a mistake names its key and shows the arithmetic.
    pub fn of(asked: &Asked, world: usize) -> Result<Self, Problem> {
        let Asked { dp, dp_replicate, cp, tp, pp, ep, sharded, .. } = *asked;
        let ring = ring(asked)?;
        let model = pp * cp * tp * ep;
        let others: Vec<String> = [("pp_size", pp), ("cp_size", cp), ("tp_size", tp), ("ep_size", ep)]
            .into_iter()
            .filter(|(_, degree)| *degree > 1)
            .map(|(name, degree)| format!("{name} {degree}"))
            .collect();
        let product = |dp: String| [vec![dp], others.clone()].concat().join(" × ");
        let ranks = |n: usize| counted(n, "rank");
        if !world.is_multiple_of(model) {
            let message =
                format!("{} need a multiple of {}, but the run has {}", others.join(" × "), ranks(model), ranks(world));
            return Err(Problem::new(message).field("dp_size").help("change the degrees, or `ranks`"));
        }
        let fits = world / model;
        let dp = dp.unwrap_or(fits);
        if dp != fits {
            let sum = product(format!("dp_size {dp}"));
            let message = format!("{sum} is {}, but the run has {}", ranks(dp * model), ranks(world));
            let help = format!("set `dp_size: {fits}` or leave it out, or set `ranks = {}`", dp * model);
            return Err(Problem::new(message).field("dp_size").help(help));
        }
        let replicate = if sharded { dp_replicate.unwrap_or(1) } else { dp };
        if replicate == 0 || dp % replicate != 0 {
            let message = format!("dp_replicate_size {replicate} does not divide dp_size {dp}");
            return Err(Problem::new(message).field("dp_replicate_size").help("dp_size counts the replicas, too"));
        }
        Ok(Self { degrees: [ep, pp, replicate, dp / replicate, cp, tp], ring })
    }

    /// Ranks along `cp` that trade tokens for heads with each other.
    pub fn ulysses(&self) -> usize {
        self.degree(Axis::Cp) / self.ring
    }

    /// Ranks along `axis`.
    pub fn degree(&self, axis: Axis) -> usize {
        self.degrees[axis as usize]
    }

    /// Ranks in all.
    pub fn world(&self) -> usize {
        self.degrees.iter().product()
    }

    /// Where `rank` is on each axis.
    pub fn coordinates(&self, rank: usize) -> [usize; 6] {
        let mut rest = rank;
        let mut coordinates = [0; 6];
        for (place, degree) in coordinates.iter_mut().zip(&self.degrees).rev() {
            *place = rest % degree;
            rest /= degree;
        }
        coordinates
    }

    /// The rank at `coordinates`.
    pub fn rank(&self, coordinates: [usize; 6]) -> usize {
        self.degrees.iter().zip(coordinates).fold(0, |rank, (degree, place)| rank * degree + place)
    }

    /// Ranks that differ from `rank` along `axes` at most, in order; `rank` is one of them.
    pub fn group(&self, rank: usize, axes: &[Axis]) -> Vec<usize> {
        let own = self.coordinates(rank);
        let fixed: Vec<usize> = Axis::ALL.into_iter().filter(|axis| !axes.contains(axis)).map(|a| a as usize).collect();
        (0..self.world())
            .filter(|other| {
                let coordinates = self.coordinates(*other);
                fixed.iter().all(|axis| coordinates[*axis] == own[*axis])
            })
            .collect()
    }

    /// Ranks that see different samples: those of other experts, and along the data axes of `rank`.
    pub fn data_group(&self, rank: usize) -> Vec<usize> {
        self.group(rank, &[Axis::Ep, Axis::DpReplicate, Axis::DpShard])
    }
}

/// Groups along `cp` that form a ring: the two degrees multiply to `cp_size`, and what is left out of them is found by division.
fn ring(asked: &Asked) -> Result<usize, Problem> {
    let Asked { cp, cp_ring, cp_ulysses, .. } = *asked;
    let wrong = |key: &str, message: String| {
        let help = "`cp_size` is the product of the two degrees; leave one of them out";
        Err(Problem::new(message).field(key).help(help))
    };
    match (cp_ring, cp_ulysses) {
        (Some(ring), Some(ulysses)) if ring * ulysses != cp => {
            let product = ring * ulysses;
            wrong(
                "cp_ring_degree",
                format!("cp_ring_degree {ring} × cp_ulysses_degree {ulysses} is {product}, but cp_size is {cp}"),
            )
        }
        (Some(ring), None) if ring == 0 || cp % ring != 0 => {
            wrong("cp_ring_degree", format!("cp_ring_degree {ring} does not divide cp_size {cp}"))
        }
        (None, Some(ulysses)) if ulysses == 0 || cp % ulysses != 0 => {
            wrong("cp_ulysses_degree", format!("cp_ulysses_degree {ulysses} does not divide cp_size {cp}"))
        }
        (Some(ring), _) => Ok(ring),
        (None, Some(ulysses)) => Ok(cp / ulysses),
        (None, None) => Ok(1),
    }
}

impl fmt::Display for Mesh {
    /// `dp_replicate 2 × dp_shard 4`; `1 rank`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let wide = Axis::ALL.into_iter().filter(|axis| self.degree(*axis) > 1);
        let text: Vec<String> = wide.map(|axis| format!("{axis} {}", self.degree(axis))).collect();
        f.write_str(if text.is_empty() { "1 rank" } else { "" })?;
        f.write_str(&text.join(" × "))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn meshes() -> impl Strategy<Value = Mesh> {
        prop::array::uniform6(1usize..4).prop_map(|degrees| Mesh { degrees, ring: 1 })
    }

    fn asked() -> Asked {
        Asked { cp: 1, tp: 1, pp: 1, ep: 1, sharded: true, ..Asked::default() }
    }

    proptest! {
        #[test]
        fn ranks_and_coordinates_are_one_to_one(mesh in meshes()) {
            for rank in 0..mesh.world() {
                let coordinates = mesh.coordinates(rank);
                prop_assert_eq!(mesh.rank(coordinates), rank);
                for axis in Axis::ALL {
                    prop_assert!(coordinates[axis as usize] < mesh.degree(axis));
                }
            }
        }

        #[test]
        fn groups_part_the_world(mesh in meshes(), chosen in prop::collection::vec(prop::sample::select(Axis::ALL.to_vec()), 0..4)) {
            let mut axes = chosen;
            axes.sort();
            axes.dedup();
            let size: usize = axes.iter().map(|axis| mesh.degree(*axis)).product();
            let mut members = vec![0; mesh.world()];
            for rank in 0..mesh.world() {
                let group = mesh.group(rank, &axes);
                prop_assert_eq!(group.len(), size);
                prop_assert!(group.contains(&rank) && group.is_sorted());
                // Every member sees the same group, in the same order.
                prop_assert!(group.iter().all(|other| mesh.group(*other, &axes) == group));
                members[group[0]] += 1;
            }
            prop_assert_eq!(members.iter().sum::<usize>(), mesh.world());
            prop_assert!(members.iter().all(|n| *n == 0 || *n == size));
        }

        #[test]
        fn what_is_asked_for_is_what_there_is(replicate in 1usize..4, shard in 1usize..5, tp in 1usize..3, given in any::<bool>()) {
            let dp = replicate * shard;
            let asked = Asked { dp: given.then_some(dp), dp_replicate: Some(replicate), tp, ..asked() };
            let mesh = Mesh::of(&asked, dp * tp).unwrap();
            prop_assert_eq!((mesh.degree(Axis::DpReplicate), mesh.degree(Axis::DpShard), mesh.degree(Axis::Tp)), (replicate, shard, tp));
            prop_assert_eq!(mesh.world(), dp * tp);
        }
    }

    #[test]
    fn neighbours_differ_on_the_last_axis() {
        let mesh = Mesh::of(&Asked { tp: 2, ..asked() }, 8).unwrap();
        assert_eq!(mesh.group(0, &[Axis::Tp]), [0, 1]);
        assert_eq!(mesh.data_group(1), [1, 3, 5, 7]);
        assert_eq!(mesh.to_string(), "dp_shard 4 × tp 2");
        assert_eq!(Mesh::alone().to_string(), "1 rank");
    }

    #[test]
    fn experts_lie_furthest_apart_and_see_other_samples() {
        let mesh = Mesh::of(&Asked { ep: 2, tp: 2, ..asked() }, 8).unwrap();
        assert_eq!(mesh.to_string(), "ep 2 × dp_shard 2 × tp 2");
        assert_eq!(mesh.group(1, &[Axis::Ep]), [1, 5]);
        assert_eq!(mesh.data_group(0), [0, 2, 4, 6]);
    }

    #[test]
    fn a_context_is_a_ring_of_groups_that_trade_heads() {
        let ulysses = |ring, ulysses| {
            let asked = Asked { cp: 4, cp_ring: ring, cp_ulysses: ulysses, ..asked() };
            Mesh::of(&asked, 4).unwrap().ulysses()
        };
        assert_eq!([ulysses(None, None), ulysses(Some(2), None), ulysses(None, Some(1))], [4, 2, 1]);
        assert_eq!(ulysses(Some(2), Some(2)), 2);
    }

    #[test]
    fn copies_are_the_replicate_axis() {
        let mesh = Mesh::of(&Asked { sharded: false, ..asked() }, 4).unwrap();
        assert_eq!((mesh, mesh.degree(Axis::DpShard)), (Mesh::replicated(4), 1));
    }

    #[test]
    fn a_mistake_shows_the_arithmetic() {
        let refused = |asked: Asked, world| Mesh::of(&asked, world).unwrap_err();
        let problem = refused(Asked { dp: Some(8), tp: 2, ..asked() }, 4);
        assert_eq!(problem.message, "dp_size 8 × tp_size 2 is 16 ranks, but the run has 4 ranks");
        assert_eq!(problem.help.as_deref(), Some("set `dp_size: 2` or leave it out, or set `ranks = 16`"));
        let problem = refused(Asked { cp: 3, tp: 2, ..asked() }, 4);
        assert_eq!(problem.message, "cp_size 3 × tp_size 2 need a multiple of 6 ranks, but the run has 4 ranks");
        let problem = refused(Asked { dp_replicate: Some(3), ..asked() }, 4);
        assert_eq!(problem.message, "dp_replicate_size 3 does not divide dp_size 4");
        assert_eq!(problem.field.as_deref(), Some("dp_replicate_size"));
        let problem = refused(Asked { cp: 4, cp_ring: Some(2), cp_ulysses: Some(4), ..asked() }, 4);
        assert_eq!(problem.message, "cp_ring_degree 2 × cp_ulysses_degree 4 is 8, but cp_size is 4");
        let problem = refused(Asked { cp: 4, cp_ulysses: Some(3), ..asked() }, 4);
        assert_eq!(problem.message, "cp_ulysses_degree 3 does not divide cp_size 4");
    }
}
